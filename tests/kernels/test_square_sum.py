"""The kernels of the sum of squares against fp64."""

import math

import pytest
import torch

from megazero.ops.segments import DeviceSignals
from megazero.ops.square_sum import square_sum_cuda
from megazero.ops.update import StepFacts, UpdateCall, update_cuda
from megazero.optim.elementwise import Sgd
from tests.kernels.harness import DTYPES, WIDTHS, in_every_order
from tests.kernels.updates import shifted
from tests.tables import over_table


def drawn(sizes, dtype):
    g = torch.Generator().manual_seed(len(sizes))
    return [shifted(torch.randn(n, generator=g).to(dtype), number % 9) for number, n in enumerate(sizes)]


def check(tensors):
    def run(kernels):
        overflow = torch.full((1,), 7.0)
        total = square_sum_cuda(tensors, overflow, kernels)
        assert (total.shape, total.dtype) == ((), torch.float64)
        return [total.view(1), overflow]

    total, overflow = in_every_order(run)
    wanted = sum((tensor.double() ** 2).sum() for tensor in tensors)
    torch.testing.assert_close(total[0], wanted, rtol=1e-13, atol=0.0, equal_nan=True)
    assert overflow.tolist() == [0.0 if math.isfinite(wanted) else 1.0]


@over_table("dtype", DTYPES, ids=str)
def test_every_size(dtype):
    check(drawn((0, *WIDTHS[:60]), dtype))
    check(drawn((*WIDTHS[60:], 0), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_chunks_and_launches(dtype):
    check(drawn((33_001, *[3] * 130, 16_384), dtype))


@pytest.mark.parametrize("sizes", [(0,), (0, 0)])
def test_nothing_sums_to_zero(sizes):
    zeros = [torch.zeros(n) for n in sizes]
    total = in_every_order(lambda kernels: [square_sum_cuda(zeros, kernels=kernels).view(1)])[0]
    assert total == 0.0


@over_table("value", [math.inf, -math.inf, math.nan])
@over_table("dtype", DTYPES, ids=str)
def test_what_is_not_finite_shows(dtype, value):
    tensors = drawn((5, 1000), dtype)
    tensors[1][777] = value
    check(tensors)


@over_table("dtype", DTYPES, ids=str)
def test_neither_large_nor_small_squares_are_lost(dtype):
    """fp16's largest squares beyond it, fp32's beyond itself; those of denormals are below it."""
    check([torch.full((100,), torch.finfo(dtype).max, dtype=dtype)])
    check([torch.full((100,), torch.finfo(dtype).smallest_normal / 4, dtype=dtype)])


def test_other_strides_and_shapes():
    check([torch.randn(6, 5).t(), torch.randn(()), torch.randn(8)[::2]])


@over_table(("value", "moved"), [(1.0, 0.75), (math.inf, 1.0), (math.nan, 1.0)])
def test_an_optimizer_skips_a_step_that_the_sum_finds_not_finite(value, moved):
    """The host learns of neither."""

    def run(kernels):
        p, grad, overflow = torch.ones(5), torch.full((5,), value).half(), torch.empty(1)
        square_sum_cuda([grad], overflow, kernels)
        signals = DeviceSignals(overflow=overflow)
        step = UpdateCall(Sgd(0.0), StepFacts(1, 0.25, 0.0, signals), [p], [grad], [[]], [None])
        update_cuda(step, kernels=kernels)
        return [p]

    assert in_every_order(run)[0].tolist() == [moved] * 5
