"""The kernels of bias + dropout + residual: masks bit for bit, numbers against fp64."""

import pytest
import torch

from megazero.ops.bias_dropout_add import bias_dropout_add_cuda, bias_dropout_add_reference
from megazero.ops.dropout import Dropout, dropout_mask_hidden
from tests.kernels.harness import DTYPES, WIDTHS, Bound, in_every_order

POSITIONS = {"range": lambda s, b: range(5, 5 + s), "each": lambda s, b: torch.arange(s * b).view(s, b) * 3}


def inputs(shape, dtype, residual_dtype=None, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, residual, grad = (torch.randn(shape, generator=g) for _ in range(3))
    wide = residual_dtype or dtype
    added = torch.randn(shape[-1], generator=g) if bias else None
    return x.to(dtype), added, residual.to(wide), grad.to(wide)


def dropout_of(shape, p, positions="range"):
    s, b, _ = shape
    return None if p is None else Dropout(p, torch.arange(b) * 7 - 3, POSITIONS[positions](s, b))


def by_kernels(x, bias, residual, grad, dropout):
    def run(kernels):
        leaves = [None if each is None else each.clone().requires_grad_() for each in (x, bias, residual)]
        out = bias_dropout_add_cuda(*leaves, dropout, kernels)
        out.backward(grad)
        return out, *(None if each is None else each.grad for each in leaves)

    # Without dropout, bias and a change of dtype, backward has nothing to launch, but forward has.
    return in_every_order(run)


def check(x, bias, residual, grad, dropout):
    out, grad_x, grad_bias, grad_residual = by_kernels(x, bias, residual, grad, dropout)
    leaves = [None if t is None else t.double().requires_grad_() for t in (x, bias, residual)]
    exact = bias_dropout_add_reference(*leaves, dropout)
    exact.backward(grad.double())
    assert out.dtype == residual.dtype
    terms = x.double().abs() + (0 if bias is None else bias.double().abs())
    share = 1.0 if dropout is None else 1 / (1 - dropout.p)
    tiny = 2.0**-23 / torch.finfo(out.dtype).eps
    assert Bound(1, 4 * tiny * (terms * share + residual.double().abs())).holds(out, exact.detach())
    assert grad_x.dtype == x.dtype
    assert Bound(1).holds(grad_x, leaves[0].grad)
    assert torch.equal(grad_residual, grad)
    if bias is not None:
        summed = (grad.double().abs() * share).sum((0, 1))
        assert Bound(4, summed).holds(grad_bias, leaves[1].grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype):
    for width in WIDTHS:
        shape = (1 + width % 3 if width < 70 else 1, 1, width)
        check(*inputs(shape, dtype, bias=width % 5 > 0, seed=width), dropout_of(shape, 0.3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("p", [None, 0.0, 0.9])
def test_residuals_in_fp32_and_without_dropout_or_bias(dtype, wide, bias, p):
    shape = (3, 2, 24)
    check(*inputs(shape, dtype, torch.float32 if wide else None, bias), dropout_of(shape, p, "each"))


@pytest.mark.parametrize("shape", [(23, 2, 8), (9, 1, 8193), (2, 0, 8), (0, 1, 8193)])
def test_rows_that_groups_take_in_turns(shape):
    check(*inputs(shape, torch.float32), dropout_of(shape, 0.5))


@pytest.mark.parametrize("p", [0.0, 2.0**-32, 0.1, 0.5, 1 - 2.0**-32])
@pytest.mark.parametrize("width", [37, 72])
def test_masks_are_those_of_the_reference(p, width):
    """Bit for bit, forward and backward, at the ends of the range of p and for any keys."""
    shape = (4, 3, width)
    keys = torch.tensor([-1, 2**63 - 1, -(2**63)])
    dropout = Dropout(p, keys, torch.tensor([0, 1, 2**31, 2**62]))
    kept = dropout_mask_hidden(dropout, *shape)
    ones, zeros = torch.ones(shape), torch.zeros(shape)
    out, grad_x, _, _ = by_kernels(ones, None, zeros, ones, dropout)
    assert torch.equal(out != 0, kept)
    assert torch.equal(grad_x != 0, kept)


def test_extreme_values_and_a_residual_of_another_type():
    """Of what is dropped, infinity and NaN are NaN, as in the reference: no overflow goes unnoticed."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40, 65504, 0, 3, 4]).repeat(3, 2, 1)
    residual = torch.ones(3, 2, 8).half()
    dropout = dropout_of((3, 2, 8), 0.5)
    out, grad_x, _, _ = by_kernels(x, None, residual, residual, dropout)
    exact = bias_dropout_add_reference(x.double(), None, residual.double(), dropout)
    assert (out.dtype, grad_x.dtype) == (torch.float16, torch.float32)
    assert Bound(1).holds(out, exact)


def test_strided_and_shifted_inputs():
    shape = (3, 2, 16)
    x, bias, residual, grad = inputs(shape, torch.bfloat16)
    shifted = torch.cat([bias.new_zeros(1), bias])[1:]
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    check(strided, shifted, residual, grad, dropout_of(shape, 0.3))
