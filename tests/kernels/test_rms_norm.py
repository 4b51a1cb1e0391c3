"""RMSNorm's kernels against the formula in fp64."""

import pytest
import torch

from megazero.ops.rms_norm import add_rms_norm_cuda, rms_norm_cuda, rms_norm_reference
from tests.kernels import norms
from tests.kernels.bounds import rounded_after, shifted
from tests.kernels.harness import DTYPES, WIDTHS, Bound, in_every_order, same_bits

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 8200), (9, 33), (21, 24), (0, 8), (3, 1000)])
def test_the_sum_is_what_is_normalized(rows, width, dtype):
    x, residual, *grads = norms.inputs(rows, width, dtype)
    check_sum(x, residual, norms.vectors(1, width), grads)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_gradient_that_does_not_arrive_is_zero(missing):
    x, residual, *grads = norms.inputs(3, 40, torch.float32)
    grads[missing] = None
    check_sum(x, residual, norms.vectors(1, 40), grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_and_addresses(dtype):
    x, residual, *grads = norms.inputs(5, 48, dtype)
    grads = shifted(grads[0]), grads[1].t().contiguous().t()
    check_sum(x.t().contiguous().t(), shifted(residual), norms.vectors(1, 48), grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_rows(dtype):
    """One element that is not finite spoils its row and no other; constants and denormals are ordinary."""
    x, _, grad, _ = norms.inputs(6, 40, dtype)
    (weight,) = norms.vectors(1, 40)
    x[0, 3], x[1, 4], x[2, 5] = torch.inf, -torch.inf, torch.nan
    x[3], x[4] = 65504.0, x[4] * 2.0**-23 if dtype == torch.float16 else x[4] * 1e-39
    y, grad_x, _ = by_kernels(x, weight, grad)
    # x / inf is 0, but for the element that is infinite.
    assert torch.equal(y[:2].isnan(), x[:2].isinf())
    assert y[2].isnan().all()
    assert grad_x[:3].isnan().any(-1).all()
    assert y[3:].isfinite().all()
    check(x[3:], weight, grad[3:])


def check_sum(x, residual, parameters, grads):
    y, total, grad_x, grad_residual, grad_weight = norms.run_added(
        add_rms_norm_cuda, x, residual, parameters, grads
    )
    assert same_bits(total, x + residual)
    assert same_bits(grad_x, grad_residual)
    grad, grad_total = (torch.zeros_like(total) if each is None else each for each in grads)
    exact = exactly(total, *parameters, grad)
    wide, wide_grad = total.double(), grad.double()
    scale = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    assert Bound(3).holds(y, exact[0])
    size = (scale * wide_grad * parameters[0]).abs().amax(-1, keepdim=True) + grad_total.double().abs()
    assert rounded_after(8, size, x.dtype).holds(grad_x, exact[1] + grad_total.double())
    assert Bound(4, (scale * wide * wide_grad).abs().sum(0)).holds(grad_weight, exact[2])
