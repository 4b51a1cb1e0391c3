"""AdamW's kernel against the formula in fp64."""

import pytest
import torch

from megazero.ops.adam.cuda import adam_cuda
from megazero.ops.adam.reference import adam_reference
from tests.kernels.harness import DTYPES, in_every_order, watched
from tests.kernels.updates import (
    SIZES,
    check_cuts,
    check_extremes,
    check_signals,
    check_step,
    pieces,
)

SETTINGS = {"step": 3, "lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def step(own, **others):
    adam_cuda(own.params, own.grads, *own.moments, own.weights, **SETTINGS, **others)


def reference(own):
    adam_reference(own.params, own.grads, *own.moments, **SETTINGS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size(dtype):
    check_step(step, reference, pieces(SIZES, 2, dtype, torch.bfloat16), units=4)


@pytest.mark.parametrize("weights", [None, torch.float32, torch.float16], ids=str)
def test_every_kind_of_weights(weights):
    check_step(step, reference, pieces((130, 5, 0, 33), 2, torch.bfloat16, weights), units=4)


def test_more_segments_than_a_launch_takes():
    check_step(step, reference, pieces([3, 0, 1, 9] * 33, 2, torch.bfloat16, torch.bfloat16), units=4)


def test_gradients_of_several_dtypes():
    start = pieces((130, 5, 33), 2, torch.float32, torch.bfloat16)
    start.grads = [start.grads[0].half(), start.grads[1].double(), start.grads[2].bfloat16()]
    start.weights = [None, start.weights[1].half(), start.weights[2]]
    check_step(step, reference, start, units=4)


def test_nothing():
    adam_cuda([], [], [], [], **SETTINGS, kernels=watched())
    nothing = torch.zeros(0)
    adam_cuda([nothing], [nothing], [nothing], [nothing], **SETTINGS, kernels=watched())


def test_extremes():
    check_extremes(step, reference, 2)


def test_cuts():
    check_cuts(step, pieces((4200,), 2, torch.bfloat16, torch.bfloat16), (1, 2, 5, 64, 71, 2000, 4199))


def test_signals():
    check_signals(step, pieces((130, 5, 33), 2, torch.float16, torch.float16))


def test_tensors_of_other_sizes_and_strides_are_refused():
    three, four = torch.ones(3), torch.ones(4)
    with pytest.raises(AssertionError, match="other sizes"):
        adam_cuda([three], [four], [three], [three], **SETTINGS, kernels=watched())
    apart = torch.ones(6)[::2]
    with pytest.raises(AssertionError, match="contiguous"):
        adam_cuda([apart], [three], [three.clone()], [three.clone()], **SETTINGS, kernels=watched())


def test_the_bits_are_those_of_one_formula():
    """Operations are rounded one by one, or fused where the kernel says so: worked out in fractions."""

    def run(kernels):
        own = [torch.tensor([value]) for value in (1.1, 0.3, -0.7, 0.9)]
        adam_cuda(*([each] for each in own), **SETTINGS, kernels=kernels)
        return [own[0], *own[2:]]

    p, m, v = in_every_order(run)
    assert [each.view(torch.int32).item() for each in (p, m, v)] == [1066258507, -1088841319, 1062996016]
