"""GELU's kernels, with and without a bias, against the formula in fp64."""

import pytest
import torch

from megazero.ops.bias_gelu import bias_gelu_cuda, bias_gelu_reference
from tests.kernels.bounds import rounded_after, shifted
from tests.kernels.harness import DTYPES, in_every_order, same_bits, watched

WIDTHS = (1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 127, 255, 256, 257, 264, 513, 1024, 1032, 2049, 4099)


def inputs(rows, width, dtype, scale=2.0):
    generator = torch.Generator().manual_seed(width)
    x, grad = (torch.randn(rows, width, generator=generator) for _ in range(2))
    return (x * scale).to(dtype), torch.randn(width, generator=generator).to(dtype), grad.to(dtype)


def by_kernels(x, bias, grad, exact):
    leaves = [each for each in (x, bias) if each is not None]

    def run(kernels):
        own = [each.detach().requires_grad_() for each in leaves]
        y = bias_gelu_cuda(own[0], own[1] if len(own) == 2 else None, exact, kernels)
        return y, *torch.autograd.grad(y, own, grad)

    return in_every_order(run)


def check(x, bias, grad, exact):
    y, grad_x, *grad_bias = by_kernels(x, bias, grad, exact)
    own = [each.double().requires_grad_() for each in (x, bias) if each is not None]
    true = bias_gelu_reference(own[0], own[1] if len(own) == 2 else None, exact)
    true_x, *true_bias = torch.autograd.grad(true, own, grad.double())
    z = own[0].detach() + (0 if bias is None else own[1].detach())
    # 1 + erf, and z + bias, round at the size of what they add.
    terms, wide_grad = z.abs() + (0 if bias is None else own[1].detach().abs()), grad.double().abs()
    assert rounded_after(2, terms, x.dtype).holds(y, true.detach())
    assert rounded_after(4, wide_grad * (1 + terms), x.dtype).holds(grad_x, true_x)
    if bias is not None:
        sums = (wide_grad * (1 + terms)).sum(0)
        assert rounded_after(4, sums, x.dtype).holds(grad_bias[0], true_bias[0])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype, exact):
    for width in WIDTHS:
        check(*inputs(1 + width % 3, width, dtype), exact)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_bias_rows_do_not_matter(dtype, exact):
    """An array may end within a pack, whatever its rows are."""
    for rows, width in ((1, 1), (3, 5), (7, 33), (1, 513), (5, 1031)):
        x, _, grad = inputs(rows, width, dtype, scale=20.0)
        check(x, None, grad, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(41, 24), (19, 333), (0, 8)])
def test_rows_that_groups_take_in_turns(rows, width, dtype):
    check(*inputs(rows, width, dtype), False)


def test_a_bias_gradient_is_summed_in_fp32():
    """2,049 rows of a gradient of 1: a sum in bf16 would stop at 256."""
    x, bias, grad = torch.full((2049, 1), 30.0), torch.zeros(1), torch.ones(2049, 1)
    *_, grad_bias = by_kernels(x.bfloat16(), bias.bfloat16(), grad.bfloat16(), False)
    assert grad_bias.tolist() == [2048.0]
    *_, grad_bias = by_kernels(x, bias, grad, False)
    assert grad_bias.tolist() == [2049.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_and_addresses(dtype):
    x, bias, grad = inputs(5, 48, dtype)
    check(x.t().contiguous().t(), shifted(bias), shifted(grad), True)
    check(shifted(x), None, grad.t().contiguous().t(), False)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_numbers(dtype, exact):
    tiny = torch.finfo(dtype).smallest_normal / 4
    x = torch.tensor(
        [torch.inf, torch.nan, 65504.0, -65504.0, tiny, -tiny, 0.0, 1e4, -1e4, 12.0], dtype=dtype
    )
    y, slope = by_kernels(x, None, torch.ones_like(x), exact)
    halved = x[4:6] / 2
    expected = torch.tensor([torch.inf, torch.nan, x[2], 0, *halved, 0, x[7], 0, 12], dtype=dtype)
    assert torch.equal(y.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    steps = torch.tensor([1, torch.nan, 1, 0, 0.5, 0.5, 0.5, 1, 0, 1], dtype=dtype)
    assert torch.equal(slope.nan_to_num(nan=-1.0), steps.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_gives_nothing(shape):
    """No kernel is started, and a bias without rows has a gradient of zeros."""
    library = watched()
    x, bias = torch.zeros(shape, requires_grad=True), torch.ones(shape[1], requires_grad=True)
    assert bias_gelu_cuda(x, None, False, library).shape == shape
    assert library.report().kernels == {}
    y = bias_gelu_cuda(x, bias, False, library)
    grads = torch.autograd.grad(y, (x, bias), torch.ones(shape))
    assert (grads[0].shape, grads[1].tolist()) == (shape, [0.0] * shape[1])


def test_both_forms_differ():
    x, bias, grad = inputs(2, 16, torch.float32)
    tanh, erf = (by_kernels(x, bias, grad, exact) for exact in (False, True))
    assert not any(same_bits(one, other) for one, other in zip(tanh, erf, strict=True))
