"""The two passes of LAMB: by hand, and every implementation against the reference in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megazero.ops.lamb import LAMB_MOVE, LAMB_NORMS, LambMoments, LambTerms, lamb_move, lamb_norms
from megazero.ops.native import available
from tests.ops.test_updates import BF16, F16, NATIVE, same
from tests.tables import over_table

MOMENTS = LambMoments(0.9, 0.99)
PAIRS = [
    pytest.param(norms, move, id=norms.name)
    for norms, move in zip(LAMB_NORMS.implementations, LAMB_MOVE.implementations, strict=True)
    if norms.name != "cuda" and (norms.name != "native_cpu" or available())
]


def test_by_hand() -> None:
    """m = 0.1 x 2 and v = 0.01 x 4; u = 3 x 0.2 / (0.2 + 0.1) + 0.5 x 4 = 4."""
    p, m, v = torch.tensor([4.0]), torch.zeros(1), torch.zeros(1)
    terms = LambTerms(3.0, 0.1)
    (found,) = lamb_norms([p], [torch.tensor([2.0])], [m], [v], [0.5], MOMENTS, terms)
    assert found.dtype == torch.float64
    assert [p.item(), m.item(), v.item()] == pytest.approx([4.0, 0.2, 0.04])
    assert found.tolist() == pytest.approx([4.0, 4.0], rel=1e-6)
    lamb_move([p], [m], [v], [torch.tensor(0.25)], [None], [0.5], terms)
    assert p.item() == pytest.approx(3.0)


def tensors(size: int, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    p, g, m, v = torch.randn(4, size, generator=generator) * scale
    return [p, g, m, v.square()]


def step(norms, move, own, terms, *, out=None, scale=1.0) -> Tensor:
    """Both passes of one piece; returns its norms."""
    p, g, m, v = own
    (measured,) = norms([p], [g], [m], [v], LambMoments(MOMENTS.beta1, MOMENTS.beta2, scale), terms)
    move([p], [m], [v], [torch.tensor(0.01, dtype=p.dtype)], [out], terms)
    return measured


@over_table(("norms", "move"), PAIRS)
@over_table("decay", [0.0, 0.1])
@over_table("scale", [1.0, 1e-15, 1e18])
@over_table("size", [0, 1, 7, 1031, 40_009])
def test_equals_the_reference(norms, move, size, scale, decay) -> None:
    """Ragged sizes; small squares; weights whose sum of squares is beyond fp32, in which a GPU sums."""
    scale = min(scale, 1e15) if norms.name == "blocks" else scale
    mine = tensors(size, scale)
    true = [each.double() for each in mine]
    found, wanted = (
        step(fn, move_fn, own, LambTerms(0.7, 1e-20, decay))
        for fn, move_fn, own in ((norms.fn, move.fn, mine), (LAMB_NORMS.reference, LAMB_MOVE.reference, true))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)
    for ours, theirs in zip(mine, true, strict=True):
        largest = theirs.abs().max().item() if size else 0.0
        torch.testing.assert_close(ours.double(), theirs, rtol=0.0, atol=2e-6 * largest)


def test_nothing_but_the_threads_depends_on_their_number() -> None:
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            p, g, m, v = tensors(100_003, 1.0)
            (norms,) = lamb_norms([p], [g], [m], [v], [0.1], MOMENTS, LambTerms(1.0, 1e-8))
            lamb_move([p], [m], [v], [torch.tensor(0.01)], [None], [0.1], LambTerms(1.0, 1e-8))
        finally:
            torch.set_num_threads(before)
        found.append((norms, p, m, v))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_meta_tensors_pass() -> None:
    p, g, m, v = (torch.empty(5, device="meta") for _ in range(4))
    (norms,) = lamb_norms([p], [g], [m], [v], [0.1], MOMENTS, LambTerms(1.0, 1e-8))
    lamb_move([p], [m], [v], [norms[0].float()], [None], [0.1], LambTerms(1.0, 1e-8))
    assert (norms.shape, norms.device.type) == ((2,), "meta")


@NATIVE
@pytest.mark.parametrize("width", [BF16, F16])
def test_both_passes_read_and_write_what_is_narrow(width):
    generator = torch.Generator().manual_seed(1)
    norms, move = (each.implementations[0].fn for each in (LAMB_NORMS, LAMB_MOVE))
    terms = LambTerms(1.5, 1e-6, 0.1)
    for size in (1, 67, 128, 1023, 40_001):
        p, g, m, v = torch.randn(4, size, generator=generator).unbind()
        g, v = g.to(width), v.square()
        found, wanted = ([each.clone() for each in (p, grad, m, v)] for grad in (g, g.float() * 0.3))
        out = torch.empty(size, dtype=width)
        mine = step(norms, move, found, terms, out=out, scale=0.3)
        assert torch.equal(mine, step(norms, move, wanted, terms))
        assert all(same(found[i], wanted[i]) for i in (0, 2, 3))
        assert same(out, found[0].to(width))
        exact = [each.double() for each in (p, g, m, v)]
        truth = step(LAMB_NORMS.reference, LAMB_MOVE.reference, exact, terms, scale=0.3)
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[0].double(), exact[0], rtol=2e-6, atol=1e-6)


@NATIVE
def test_an_element_moves_the_same_way_wherever_it_lies():
    size, terms = 5003, LambTerms(1.5, 1e-6)
    start = list(torch.randn(4, size, generator=torch.Generator().manual_seed(1)).unbind())
    start[3] = start[3].square()
    moments, runs = LambMoments(0.9, 0.99, 0.3), []
    for cuts in ([size], [1] * size, [128, 129, 4746], [3] * 1667 + [2]):
        whole = [each.clone() for each in start]
        p, g, m, v = ([*each.split(cuts)] for each in whole)
        decays = [0.1] * len(cuts)
        lamb_norms(p, g, m, v, decays, moments, terms)
        lamb_move(p, m, v, [torch.tensor(0.01)] * len(cuts), [None] * len(cuts), decays, terms)
        runs.append(whole)
    for found in runs[1:]:
        assert all(same(a, b) for a, b in zip(found, runs[0], strict=True))
