"""Layer norm's kernels, with and without a residual, against the formula in fp64."""

import pytest
import torch

from megazero.ops.layer_norm import add_layer_norm_cuda, layer_norm_cuda, layer_norm_reference
from tests.kernels.bounds import rounded_after, shifted
from tests.kernels.harness import DTYPES, same_bits
from tests.kernels.norms import EPS, WIDTHS, inputs, run_added, run_plain, vectors


def check(total, parameters, grads, results):
    """y, the gradient of what was normalized, of weight and bias, beside those of fp64."""
    y, grad_x, grad_weight, grad_bias = results
    leaves = [each.double().requires_grad_() for each in (total, *parameters)]
    exact = layer_norm_reference(*leaves, EPS)
    grad, grad_total = (torch.zeros_like(exact) if each is None else each.double() for each in grads)
    true_x, true_weight, true_bias = torch.autograd.grad(exact, leaves, grad)
    wide, weight, bias = (each.detach() for each in leaves)
    mean, dtype = wide.mean(-1, keepdim=True), total.dtype
    scale = ((wide - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    normed, most = (wide - mean) * scale, scale * wide.abs().amax(-1, keepdim=True)
    assert rounded_after(6, most * weight.abs() + bias.abs(), dtype).holds(y, exact.detach())
    offset = 1 + scale * mean.abs()
    size = scale * (grad * weight).abs().amax(-1, keepdim=True) * offset + grad_total.abs()
    assert rounded_after(8, size, dtype).holds(grad_x, true_x + grad_total)
    sums = (grad.abs() * (normed.abs() + offset - 1)).sum(0)
    assert rounded_after(8, sums, torch.float32).holds(grad_weight, true_weight)
    assert rounded_after(8, grad.abs().sum(0), torch.float32).holds(grad_bias, true_bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype):
    for width in WIDTHS:
        x, _, grad, _ = inputs(1 + width % 3, width, dtype, seed=width)
        check(x, vectors(2, width), (grad, None), run_plain(layer_norm_cuda, x, vectors(2, width), grad))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 8200), (9, 33), (21, 24), (0, 8), (3, 1000)])
def test_the_sum_is_what_is_normalized(rows, width, dtype):
    """Far from zero, where the mean of squares less the squared mean would have no digit left."""
    x, residual, *grads = inputs(rows, width, dtype, offset=200.0)
    y, total, grad_x, grad_residual, *rest = run_added(
        add_layer_norm_cuda, x, residual, vectors(2, width), grads
    )
    assert same_bits(total, x + residual)
    assert same_bits(grad_x, grad_residual)
    check(total, vectors(2, width), grads, (y, grad_x, *rest))


def test_a_wide_row_that_is_in_no_packs():
    x, residual, *grads = inputs(1, 8195, torch.float32, offset=2000.0)
    y, total, grad_x, _, *rest = run_added(add_layer_norm_cuda, x, residual, vectors(2, 8195), grads)
    check(total, vectors(2, 8195), grads, (y, grad_x, *rest))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_gradient_that_does_not_arrive_is_zero(missing):
    x, residual, *grads = inputs(3, 40, torch.float32)
    grads[missing] = None
    y, total, grad_x, _, *rest = run_added(add_layer_norm_cuda, x, residual, vectors(2, 40), grads)
    check(total, vectors(2, 40), grads, (y, grad_x, *rest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_and_addresses(dtype):
    x, residual, *grads = inputs(5, 48, dtype)
    first, second = x.t().contiguous().t(), shifted(residual)
    given = shifted(grads[0]), grads[1].t().contiguous().t()
    y, total, grad_x, _, *rest = run_added(add_layer_norm_cuda, first, second, vectors(2, 48), given)
    assert same_bits(total, x + residual)
    check(total, vectors(2, 48), grads, (y, grad_x, *rest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_rows(dtype):
    """One element that is not finite spoils its row and no other; constants and denormals are ordinary."""
    x, _, grad, _ = inputs(6, 40, dtype)
    x[0, 3], x[1, 4], x[2, 5] = torch.inf, -torch.inf, torch.nan
    x[3], x[4] = 65504.0, x[4] * 2.0**-23 if dtype == torch.float16 else x[4] * 1e-39
    y, grad_x, *_ = run_plain(layer_norm_cuda, x, vectors(2, 40), grad)
    assert y[:3].isnan().all()
    assert grad_x[:3].isnan().all()
    good = slice(3, 6)
    results = run_plain(layer_norm_cuda, x[good], vectors(2, 40), grad[good])
    assert same_bits(y[good], results[0])
    assert same_bits(grad_x[good], results[1])
    check(x[good], vectors(2, 40), (grad[good], None), results)


def test_parameters_keep_their_dtypes():
    x, _, grad, _ = inputs(3, 16, torch.bfloat16)
    weight, bias = vectors(2, 16)
    *_, grad_weight, grad_bias = run_plain(layer_norm_cuda, x, [weight.bfloat16(), bias.double()], grad)
    assert (grad_weight.dtype, grad_bias.dtype) == (torch.bfloat16, torch.float64)
