"""LAMB's kernels against the formulas in fp64."""

from functools import partial

import pytest
import torch

from megazero.ops import lamb
from megazero.ops.dispatch import Implementation, Operator
from megazero.ops.lamb import (
    LambMoments,
    LambTerms,
    lamb_move,
    lamb_norms,
    move_cuda,
    move_reference,
    norms_cuda,
    norms_reference,
)
from megazero.ops.segments import DeviceSignals
from megazero.optim.lamb import Lamb
from megazero.optim.rule import PassEnds, Pieces
from tests.kernels.harness import DTYPES, in_every_order, same_bits, watched
from tests.kernels.updates import SIZES, check_cuts, check_extremes, check_signals, check_step, pieces
from tests.tables import over_table

MOMENTS = LambMoments(0.9, 0.95)
TERMS = LambTerms(0.7, 1e-6, 0.1)


def rates(own):
    return [torch.tensor(0.01 * (1 + number), dtype=p.dtype) for number, p in enumerate(own.params)]


def outs(own):
    return own.weights or [None] * len(own.params)


def norms(own, scale=1.0, **others):
    moments = LambMoments(MOMENTS.beta1, MOMENTS.beta2, scale)
    return norms_cuda(own.params, own.grads, *own.moments, moments, TERMS, **others)


def step(own, scale=1.0, signals=DeviceSignals(), **others):  # noqa: B008 -- a frozen value
    norms(own, scale, signals=signals, **others)
    skip = DeviceSignals(overflow=signals.overflow)
    move_cuda(own.params, *own.moments, rates(own), outs(own), TERMS, signals=skip, **others)


def norms_formula(own):
    grads = [grad.to(p.dtype) for p, grad in zip(own.params, own.grads, strict=True)]
    return torch.stack(norms_reference(own.params, grads, *own.moments, MOMENTS, TERMS))


def formula(own):
    norms_formula(own)
    move_reference(own.params, *own.moments, rates(own), [None] * len(own.params), TERMS)


@over_table("dtype", DTYPES, ids=str)
def test_every_size(dtype):
    check_step(step, formula, pieces(SIZES[:-1], 2, dtype, torch.bfloat16), units=6)


def check_norms(start, chunk_of=None):
    found = in_every_order(lambda kernels: [norms(start.clone(), kernels=kernels)])[0]
    exact = start.clone()
    exact.params, exact.grads = ([e.double() for e in kind] for kind in (exact.params, exact.grads))
    exact.moments = [[e.double() for e in kind] for kind in exact.moments]
    wanted = norms_formula(exact)
    assert (found.shape, found.dtype) == (wanted.shape, torch.float64)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0.0)
    return found


def test_norms_of_every_piece():
    """With empty ones, more than a launch takes, and one of several chunks."""
    check_norms(pieces([3, 0, 1, 9, 0] * 14 + [17_001, 0], 2, torch.bfloat16, None))


def test_squares_beyond_fp32():
    start = pieces((130,), 2, torch.float32, None)
    start.params = [start.params[0] * 1e30]
    assert check_norms(start)[0, 0] > 1e30


def test_extremes():
    check_extremes(step, formula, 2)


def test_cuts():
    """Of what moves each element; the rate is one for all of a parameter's pieces."""

    def moments_and_move(own, **others):
        norms(own, **others)
        rate = [torch.tensor(0.01)] * len(own.params)
        move_cuda(own.params, *own.moments, rate, own.weights, TERMS, **others)

    check_cuts(moments_and_move, pieces((700,), 2, torch.bfloat16, torch.bfloat16), (1, 2, 5, 64, 71, 699))


def test_signals():
    check_signals(step, pieces((130, 5, 33), 2, torch.float16, torch.float16))


def test_norms_of_a_step_with_an_overflow_are_zero():
    signals = DeviceSignals(overflow=torch.ones(1))
    start = pieces((130, 5), 2, torch.float16, None)
    found = in_every_order(lambda kernels: [norms(start.clone(), signals=signals, kernels=kernels)])[0]
    assert found.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_more_pieces_than_a_launch_takes():
    check_step(step, formula, pieces([3, 0, 1, 9] * 33, 2, torch.bfloat16, torch.bfloat16), units=6)


def launches(library):
    return {name: counts.launches for name, counts in library.report().kernels.items()}


@over_table(("count", "batches"), [(1, 1), (2, 1), (63, 1), (64, 1), (65, 2), (129, 3)])
def test_launches_are_as_many_for_64_pieces_as_for_one(count, batches):
    library = watched()
    step(pieces([3, 5, 1] * (count // 3) + [9] * (count % 3), 2, torch.bfloat16, None), kernels=library)
    assert launches(library) == dict.fromkeys(("lamb_moments", "lamb_sums", "lamb_move"), batches)


def served_by(library, monkeypatch):
    """LAMB's tables with the library's kernels at the top."""
    for name, kernel in (("LAMB_NORMS", norms_cuda), ("LAMB_MOVE", move_cuda)):
        ours = Implementation("watched", partial(kernel, kernels=library))
        table = getattr(lamb, name)
        monkeypatch.setattr(lamb, name, Operator(table.name, (ours, table.implementations[-1])))


def by_the_rule(own, decays):
    """A step of the optimizer of pieces that are whole parameters."""
    rule = Lamb()
    states = [dict(zip(rule.state_names, each, strict=True)) for each in zip(*own.moments, strict=True)]
    given = Pieces(own.params, own.grads, states, decays, 3, PassEnds(0.5, own.weights))
    norms = [torch.stack(list(each)) for each in rule.prepare(given)]
    rule.step(given, 0.1, norms, [decay == 0.0 for decay in decays])
    return norms


@pytest.mark.parametrize("count", [4, 64])
def test_the_optimizer_launches_once_for_each_weight_decay(count, monkeypatch):
    start = pieces([33, 5, 130, 2] * (count // 4), 2, torch.bfloat16, torch.bfloat16)
    decays = [0.1, 0.0, 0.1, 0.0] * (count // 4)
    wanted, found, library = start.clone(), start.clone(), watched()
    wanted_norms = by_the_rule(wanted, decays)
    served_by(library, monkeypatch)
    found_norms = by_the_rule(found, decays)
    assert launches(library) == dict.fromkeys(("lamb_moments", "lamb_sums", "lamb_move"), 2)
    torch.testing.assert_close(found_norms, wanted_norms, rtol=2e-6, atol=0.0)
    masters = [*found.params, *found.moments[0], *found.moments[1]]
    theirs = [*wanted.params, *wanted.moments[0], *wanted.moments[1]]
    torch.testing.assert_close(masters, theirs, rtol=2e-6, atol=1e-6)
    for weights, master in zip(found.weights, found.params, strict=True):
        assert same_bits(weights, master.bfloat16())


def test_pieces_of_several_dtypes_come_back_in_their_order(monkeypatch):
    start = pieces((130, 5, 33, 7), 2, torch.float32, torch.bfloat16)
    start.grads[1], start.grads[2] = start.grads[1].half(), start.grads[2].double()
    start.weights[0], start.weights[3] = None, start.weights[3].half()
    wanted, found, library = start.clone(), start.clone(), watched()
    wanted.grads = [each.float() for each in wanted.grads]
    decays, terms = [0.1, 0.0, 0.1, 0.1], LambTerms(0.7, 1e-6)

    def both(own):
        norms = lamb_norms(own.params, own.grads, *own.moments, decays, MOMENTS, terms)
        lamb_move(own.params, *own.moments, rates(own), own.weights, decays, terms)
        return norms

    norms_wanted = both(wanted)
    served_by(library, monkeypatch)
    norms_found = both(found)
    assert library.report().faults == ()
    torch.testing.assert_close(norms_found, norms_wanted, rtol=2e-6, atol=0.0)
    torch.testing.assert_close(found.params, wanted.params, rtol=2e-6, atol=1e-6)
    for weights, master in zip(found.weights, found.params, strict=True):
        assert weights is None or same_bits(weights, master.to(weights.dtype))
