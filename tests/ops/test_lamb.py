"""The two passes of LAMB: by hand, and every implementation against the reference in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megazero.ops.lamb import LAMB_MOVE, LAMB_NORMS, lamb_move, lamb_norms
from megazero.ops.native import available

BETAS = {"beta1": 0.9, "beta2": 0.99}
PAIRS = [
    pytest.param(norms, move, id=norms.name)
    for norms, move in zip(LAMB_NORMS.implementations, LAMB_MOVE.implementations, strict=True)
    if norms.name != "cuda" and (norms.name != "native_cpu" or available())
]


def test_by_hand() -> None:
    """m = 0.1 x 2 and v = 0.01 x 4; u = 3 x 0.2 / (0.2 + 0.1) + 0.5 x 4 = 4."""
    p, m, v = torch.tensor([4.0]), torch.zeros(1), torch.zeros(1)
    settings = {"factor": 3.0, "eps": 0.1, "weight_decay": 0.5}
    found = lamb_norms(p, torch.tensor([2.0]), m, v, **BETAS, **settings)
    assert found.dtype == torch.float64
    assert [p.item(), m.item(), v.item()] == pytest.approx([4.0, 0.2, 0.04])
    assert found.tolist() == pytest.approx([4.0, 4.0], rel=1e-6)
    lamb_move(p, m, v, torch.tensor(0.25), **settings)
    assert p.item() == pytest.approx(3.0)


def tensors(size: int, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    p, g, m, v = torch.randn(4, size, generator=generator) * scale
    return [p, g, m, v.square()]


@pytest.mark.parametrize(("norms", "move"), PAIRS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e18])
@pytest.mark.parametrize("size", [0, 1, 7, 1031, 40_009])
def test_equals_the_reference(norms, move, size, scale, decay) -> None:
    """Ragged sizes; small squares; weights whose sum of squares is beyond fp32, in which a GPU sums."""
    scale = min(scale, 1e15) if norms.name == "blocks" else scale
    settings = {"factor": 0.7, "eps": 1e-20, "weight_decay": decay}
    mine = tensors(size, scale)
    true = [each.double() for each in mine]
    wanted = LAMB_NORMS.reference(*true, **BETAS, **settings)
    found = norms.fn(*mine, **BETAS, **settings)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)
    move.fn(mine[0], *mine[2:], torch.tensor(0.01), **settings)
    LAMB_MOVE.reference(true[0], *true[2:], torch.tensor(0.01).double(), **settings)
    for ours, theirs in zip(mine, true, strict=True):
        largest = theirs.abs().max().item() if size else 0.0
        torch.testing.assert_close(ours.double(), theirs, rtol=0.0, atol=2e-6 * largest)


def test_nothing_but_the_threads_depends_on_their_number() -> None:
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            p, g, m, v = tensors(100_003, 1.0)
            norms = lamb_norms(p, g, m, v, **BETAS, factor=1.0, eps=1e-8, weight_decay=0.1)
            lamb_move(p, m, v, torch.tensor(0.01), factor=1.0, eps=1e-8, weight_decay=0.1)
        finally:
            torch.set_num_threads(before)
        found.append((norms, p, m, v))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_meta_tensors_pass() -> None:
    p, g, m, v = (torch.empty(5, device="meta") for _ in range(4))
    norms = lamb_norms(p, g, m, v, **BETAS, factor=1.0, eps=1e-8, weight_decay=0.1)
    lamb_move(p, m, v, norms[0].float(), factor=1.0, eps=1e-8, weight_decay=0.1)
    assert (norms.shape, norms.device.type) == ((2,), "meta")
