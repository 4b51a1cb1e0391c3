"""Sums over rows that kernels complete by themselves: of biases that are included, and by many blocks."""

from __future__ import annotations

import pytest
import torch

from megazero.kernels.library import KernelLibrary
from megazero.kernels.on_cpu import ThreadOrder, WatchedLibrary
from megazero.ops.bias_dropout_add import bias_dropout_add, bias_dropout_add_cuda
from megazero.ops.bias_gelu import bias_gelu, bias_gelu_cuda
from megazero.ops.dropout import Dropout
from megazero.ops.layer_norm import add_layer_norm, add_layer_norm_cuda
from megazero.ops.rms_norm import add_rms_norm, add_rms_norm_cuda
from tests.kernels.harness import DTYPES, assert_faultless, in_every_order, library_path, same_bits


class Device(WatchedLibrary):
    """With as many groups of threads as a device has."""

    column_groups = KernelLibrary.column_groups


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1]))


def gelu(kernels, x, bias):
    return bias_gelu_cuda(x, None, False, bias, kernels=kernels)


def plain_sum(kernels, x, bias):
    return bias_dropout_add_cuda(x, None, torch.ones_like(x), None, bias, kernels=kernels)


def dropped(kernels, x, bias):
    dropout = Dropout(0.3, torch.arange(x.shape[1]) * 7 - 3, range(5, 5 + len(x)))
    return bias_dropout_add_cuda(x, None, torch.ones_like(x), dropout, bias, kernels=kernels)


def layer_norm(kernels, x, bias):
    weight, shift = randn(2, x.shape[-1]).to(x.dtype)
    y, total = add_layer_norm_cuda(x, torch.ones_like(x), weight, shift, 1e-5, bias, kernels=kernels)
    return y * 2 + total


def rms_norm(kernels, x, bias):
    weight = randn(x.shape[-1]).to(x.dtype)
    y, total = add_rms_norm_cuda(x, torch.ones_like(x), weight, 1e-5, bias, kernels=kernels)
    return y * 2 + total


CALLS = pytest.mark.parametrize("call", [gelu, plain_sum, dropped, layer_norm, rms_norm])


def gradients(call, kernels, x, again=False):
    """Of x and of a bias that it holds; computed twice if `again`."""
    x, bias = x.detach().requires_grad_(), torch.zeros(x.shape[-1], dtype=x.dtype, requires_grad=True)
    y = call(kernels, x, bias)
    grad = randn(*y.shape).to(y.dtype)
    if again:
        torch.autograd.grad(y, (x, bias), grad, retain_graph=True)
    return torch.autograd.grad(y, (x, bias), grad)


@CALLS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 8), (5, 3, 24), (7, 2, 33), (9, 2, 264), (3, 1, 1032), (19, 1, 8200), (0, 2, 8)]
)
def test_a_bias_that_is_included_gets_the_sum_over_rows(call, shape, dtype):
    x = randn(*shape).to(dtype)
    grad_x, grad_bias = in_every_order(lambda kernels: gradients(call, kernels, x))
    assert grad_bias.dtype == dtype
    # grad_x is rounded, and its sum is of what was not.
    wide = grad_x.double().flatten(0, 1)
    allowed = wide.abs().sum(0) * torch.finfo(dtype).eps + 1e-6
    assert ((grad_bias.double() - wide.sum(0)).abs() <= 2 * allowed).all()


@pytest.fixture
def poisoned():
    """Memory that nobody has written holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@CALLS
def test_no_rows_sum_to_zero(poisoned, call):
    """GELU's forward left the counters as they were where it had no rows, and its backward summed by them."""
    for width in (33, 132, 200, 256):
        library = Device(library_path())
        library.reset()
        _, grad_bias = gradients(call, library, torch.empty(0, 2, width))
        assert_faultless(library)
        assert grad_bias.eq(0).all(), width


@CALLS
@pytest.mark.parametrize("shape", [(140, 2, 8), (70, 1, 264)])
def test_sums_of_many_blocks_have_the_same_bits_in_every_order(call, shape):
    """A tree of three levels, in any order; and a second backward finds the counters clear."""
    x, results = randn(*shape), []
    for order in ThreadOrder:
        library = Device(library_path(), order, 3)
        library.reset()
        results.append(gradients(call, library, x, again=order is ThreadOrder.SHUFFLED))
        assert_faultless(library)
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))
    grad_x, grad_bias = results[0]
    exact = grad_x.double().flatten(0, 1)
    assert ((grad_bias - exact.sum(0)).abs() <= 1e-5 * exact.abs().sum(0)).all()


def test_where_no_kernel_sums_an_operator_of_its_own_does():
    """On a CPU, bit for bit as a linear layer sums."""
    x, weight, residual = randn(5, 2, 24), torch.ones(24), torch.ones(5, 2, 24)
    calls = (
        lambda x, bias: bias_gelu(x, None, included=bias),
        lambda x, bias: bias_dropout_add(x, None, residual, None, bias),
        lambda x, bias: sum(add_layer_norm(x, residual, weight, weight, 1e-5, bias)),
        lambda x, bias: sum(add_rms_norm(x, residual, weight, 1e-5, bias)),
    )
    for call in calls:
        leaf, bias = x.clone().requires_grad_(), torch.zeros(24, requires_grad=True)
        grad_x, grad_bias = torch.autograd.grad(call(leaf, bias).square().sum(), (leaf, bias))
        assert torch.equal(grad_bias, grad_x.view(-1, 24).sum(0))


def test_a_bias_without_a_place_for_its_sums_is_refused():
    """The matrix would be read as one row, and the bias as long as that."""
    x, bias = randn(3, 8), randn(8)
    arguments = (x.dtype, 0, 3, 8, 0, x, bias, randn(3, 8), torch.empty(3, 8), None, None, None)
    with pytest.raises(RuntimeError, match="invalid argument"):
        Device(library_path()).launch("bias_gelu_backward", *arguments)


def test_sizes_that_vary_are_not_kept_for_ever(monkeypatch):
    """Experts have another number of rows in each call."""
    monkeypatch.setattr("megazero.kernels.library._MOST_SIZES", 4)
    library = Device(library_path())
    assert len({library.column_groups(count, 512) for count in range(1, 4000, 100)}) > 1
    assert len(library._sizes) <= 5
