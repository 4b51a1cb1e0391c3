"""RMSNorm's kernels against the formula in fp64."""

import pytest
import torch

from megazero.ops.rms_norm.cuda import rms_norm_cuda
from megazero.ops.rms_norm.reference import rms_norm_reference
from tests.kernels.harness import DTYPES, WIDTHS, Bound, in_every_order

EPS = 1e-5


def inputs(rows, width, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(rows, width, generator=g).to(dtype) for _ in range(2))
    return x, torch.randn(width, generator=g), grad


def by_kernels(x, weight, grad):
    def run(kernels):
        own_x, own_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = rms_norm_cuda(own_x, own_weight, EPS, kernels)
        y.backward(grad)
        return y, own_x.grad, own_weight.grad

    return in_every_order(run)


def exactly(x, weight, grad):
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = rms_norm_reference(x, weight, EPS)
    y.backward(grad.double())
    return y.detach(), x.grad, weight.grad


def check(x, weight, grad):
    y, grad_x, grad_weight = by_kernels(x, weight, grad)
    exact = exactly(x, weight, grad)
    scale = (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    assert Bound(3).holds(y, exact[0])
    assert Bound(4, (scale * grad.double() * weight).abs().amax(-1, keepdim=True)).holds(grad_x, exact[1])
    assert Bound(4, (scale * x.double() * grad.double()).abs().sum(0)).holds(grad_weight, exact[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype):
    for width in WIDTHS:
        check(*inputs(1 + width % 3 if width < 2000 else 1, width, dtype, seed=width))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(9, 8193), (3, 16391), (41, 24), (0, 8)])
def test_rows_that_groups_take_in_turns(rows, width, dtype):
    check(*inputs(rows, width, dtype))
