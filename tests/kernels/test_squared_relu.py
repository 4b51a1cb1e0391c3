"""Squared ReLU's kernels against the formula in fp64."""

import pytest
import torch

from megazero.ops.squared_relu import squared_relu_cuda, squared_relu_reference
from tests.kernels.bounds import shifted
from tests.kernels.harness import DTYPES, WIDTHS, Bound, in_every_order, watched


def by_kernels(x, grad):
    def run(kernels):
        leaf = x.detach().requires_grad_()
        y = squared_relu_cuda(leaf, kernels)
        return y, *torch.autograd.grad(y, leaf, grad)

    return in_every_order(run)


def check(x, grad):
    y, grad_x = by_kernels(x, grad)
    leaf = x.double().requires_grad_()
    exact = squared_relu_reference(leaf)
    (true,) = torch.autograd.grad(exact, leaf, grad.double())
    assert Bound(1).holds(y, exact.detach())
    assert Bound(1).holds(grad_x, true)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size(dtype):
    generator = torch.Generator().manual_seed(0)
    for size in WIDTHS:
        x, grad = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
        check(x, grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_shape_strides_and_addresses(dtype):
    x, grad = (torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 2))
    check(x.transpose(0, 2).contiguous().transpose(0, 2), shifted(grad))
    check(shifted(x), grad.transpose(0, 1).contiguous().transpose(0, 1))
    check(x[:, :, 0], grad[0, 0, :15].view(3, 5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_numbers(dtype):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, -65504.0, 3.0], dtype=dtype)
    y, grad_x = by_kernels(x, torch.ones_like(x))
    assert torch.allclose(y, torch.tensor([torch.inf, 0, torch.nan, 0, 0, 9], dtype=dtype), equal_nan=True)
    assert torch.allclose(
        grad_x, torch.tensor([torch.inf, 0, torch.nan, 0, 0, 6], dtype=dtype), equal_nan=True
    )
    tiny, huge = torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max
    check(torch.tensor([tiny, -tiny, huge, -huge], dtype=dtype), torch.tensor([1, 1, 0.25, 1], dtype=dtype))


def test_nothing_gives_nothing():
    library = watched()
    x = torch.zeros(0, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(squared_relu_cuda(x, library), x, torch.zeros(0, 4))
    assert grad.shape == (0, 4)
    assert library.report().kernels == {}
