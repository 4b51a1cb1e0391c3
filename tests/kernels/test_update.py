"""The optimizers' kernels against their formulas in fp64."""

from dataclasses import replace

import pytest
import torch

from megazero.ops.segments import NO_SIGNALS
from megazero.ops.update import StepFacts, UpdateCall, has_kernels, update_cuda, update_reference
from megazero.optim.elementwise import ELEMENTWISE, Adam, Sgd
from tests.kernels.harness import DTYPES, in_every_order, watched
from tests.kernels.updates import (
    SIZES,
    check_cuts,
    check_extremes,
    check_signals,
    check_step,
    pieces,
)
from tests.tables import over_table

AT = StepFacts(3, 0.01, 0.1)
ADAM = Adam(0.9, 0.95)
RULES = (ADAM, *(kind() for kind in ELEMENTWISE.values() if kind is not Adam and has_kernels(kind)), Sgd(0.0))
EVERY_RULE = over_table("rule", RULES, ids=repr)


def call(function, rule, own, scale=1.0, signals=NO_SIGNALS, **others):
    """A step of pieces by an implementation."""
    at = replace(AT, signals=signals)
    states = list(zip(*own.moments, strict=True)) or [()] * len(own.params)
    outs = own.weights or [None] * len(own.params)
    function(UpdateCall(rule, at, own.params, own.grads, states, outs, scale), **others)


def one(rule, param, grad, state):
    """A step of one tensor."""
    return UpdateCall(rule, AT, [param], [grad], [state], [None])


def step_by(rule):
    return lambda own, **others: call(update_cuda, rule, own, **others)


def reference_of(rule):
    return lambda own: call(update_reference, rule, own)


def check(rule, sizes, dtype, weights):
    start = pieces(sizes, len(rule.state_names), dtype, weights)
    check_step(step_by(rule), reference_of(rule), start, units=4 if rule == ADAM else 6)


@EVERY_RULE
@over_table("dtype", DTYPES, ids=str)
def test_every_size(rule, dtype):
    check(rule, SIZES[:-2], dtype, torch.bfloat16)


@EVERY_RULE
def test_more_than_a_chunk(rule):
    check(rule, SIZES[-2:], torch.bfloat16, None)


@over_table("weights", [None, torch.float32, torch.float16], ids=str)
def test_every_kind_of_weights(weights):
    check(ADAM, (130, 5, 0, 33), torch.bfloat16, weights)


def test_more_segments_than_a_launch_takes():
    check(ADAM, [3, 0, 1, 9] * 33, torch.bfloat16, torch.bfloat16)


def test_gradients_of_several_dtypes():
    start = pieces((130, 5, 33), 2, torch.float32, torch.bfloat16)
    start.grads = [start.grads[0].half(), start.grads[1].double(), start.grads[2].bfloat16()]
    start.weights = [None, start.weights[1].half(), start.weights[2]]
    check_step(step_by(ADAM), reference_of(ADAM), start, units=4)


def test_nothing():
    update_cuda(UpdateCall(ADAM, AT, [], [], [], []), kernels=watched())
    nothing = torch.zeros(0)
    update_cuda(one(ADAM, nothing, nothing, (nothing, nothing)), kernels=watched())


@EVERY_RULE
def test_extremes(rule):
    check_extremes(step_by(rule), reference_of(rule), len(rule.state_names))


@EVERY_RULE
def test_cuts(rule):
    start = pieces((4200,) if rule == ADAM else (700,), len(rule.state_names), torch.bfloat16, torch.bfloat16)
    check_cuts(step_by(rule), start, (1, 2, 5, 64, 71, 699))


@EVERY_RULE
def test_signals(rule):
    kinds = len(rule.state_names)
    check_signals(step_by(rule), pieces((130, 5, 33), kinds, torch.float16, torch.float16))


def test_tensors_of_other_sizes_and_strides_are_refused():
    three, four = torch.ones(3), torch.ones(4)
    with pytest.raises(AssertionError, match="other sizes"):
        update_cuda(one(ADAM, three, four, (three, three)), kernels=watched())
    apart, state = torch.ones(6)[::2], (three.clone(), three.clone())
    with pytest.raises(ValueError, match="contiguous"):
        update_cuda(one(ADAM, apart, three, state), kernels=watched())


def test_another_number_of_states_is_refused():
    three = torch.ones(3)
    with pytest.raises(RuntimeError, match="must start, but CUDA says"):
        update_cuda(one(ADAM, three, three, (three.clone(),)), kernels=watched())


def test_the_bits_are_those_of_one_formula():
    """Operations are rounded one by one, or fused where the kernel says so: worked out in fractions."""

    def run(kernels):
        p, g, m, v = (torch.tensor([value]) for value in (1.1, 0.3, -0.7, 0.9))
        update_cuda(one(ADAM, p, g, (m, v)), kernels=kernels)
        return [p, m, v]

    p, m, v = in_every_order(run)
    assert [each.view(torch.int32).item() for each in (p, m, v)] == [1066258507, -1088841319, 1062996016]
