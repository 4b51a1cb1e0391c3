"""SwiGLU's kernels against the formula in fp64."""

import pytest
import torch

from megazero.ops.swiglu import swiglu_cuda, swiglu_reference
from tests.kernels.bounds import rounded_after, shifted
from tests.kernels.harness import DTYPES, in_every_order, watched

WIDTHS = (
    *range(1, 10),
    *(31, 32, 33, 64, 127, 128, 255, 256, 257, 264, 511, 513, 1023, 1024, 1025, 1032, 2049, 4099),
)


def inputs(rows, width, dtype, scale=3.0):
    generator = torch.Generator().manual_seed(width)
    gate_up, grad = (torch.randn(rows, n, width, generator=generator) for n in (2, 1))
    return (gate_up * scale).to(dtype), grad[:, 0].to(dtype)


def by_kernels(gate_up, grad):
    def run(kernels):
        leaf = gate_up.detach().requires_grad_()
        y = swiglu_cuda(leaf, kernels)
        return y, *torch.autograd.grad(y, leaf, grad)

    return in_every_order(run)


def check(gate_up, grad):
    y, grad_gate_up = by_kernels(gate_up, grad)
    leaf = gate_up.double().requires_grad_()
    exact = swiglu_reference(leaf)
    (true,) = torch.autograd.grad(exact, leaf, grad.double())
    gate, up = leaf.detach().unbind(1)
    s = torch.sigmoid(gate)
    # exp(-gate) overflows below -88, where the result is smaller than this.
    assert rounded_after(6, (gate * s * up).abs() + 1e-28, gate_up.dtype).holds(y, exact.detach())
    for_gate, for_up = (grad * up * s).abs() * (1 + gate.abs()), (grad * gate * s).abs()
    size = torch.stack((for_gate, for_up), 1) + 1e-28
    assert rounded_after(6, size, gate_up.dtype).holds(grad_gate_up, true)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype):
    for width in WIDTHS:
        check(*inputs(1 + width % 3, width, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(41, 24), (5, 333)])
def test_large_gates(rows, width, dtype):
    check(*inputs(rows, width, dtype, scale=60.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_and_addresses(dtype):
    gate_up, grad = inputs(5, 48, dtype)
    check(gate_up.transpose(0, 2).contiguous().transpose(0, 2), shifted(grad))
    check(shifted(gate_up), grad.t().contiguous().t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_numbers(dtype):
    gate = torch.tensor([torch.inf, torch.nan, 65504.0, -65504.0, 0.0, 2.0, 2.0], dtype=dtype)
    up = torch.tensor([2, 1, 0.5, 3, torch.inf, torch.inf, torch.nan], dtype=dtype)
    y, grads = by_kernels(torch.stack((gate, up)).unsqueeze(0), torch.ones(1, 7, dtype=dtype))
    expected = torch.tensor(
        [torch.inf, torch.nan, gate[2] / 2, 0, torch.nan, torch.inf, torch.nan], dtype=dtype
    )
    assert torch.allclose(y[0], expected, rtol=0, equal_nan=True)
    assert torch.allclose(grads[0, 1, 2:5], torch.tensor([gate[2], 0, 0], dtype=dtype), rtol=0)
    assert grads[0, 0, 2:4].tolist() == [0.5, 0]


@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 2, 0)])
def test_nothing_gives_nothing(shape):
    library = watched()
    gate_up = torch.zeros(shape, requires_grad=True)
    y = swiglu_cuda(gate_up, library)
    (grad,) = torch.autograd.grad(y, gate_up, torch.ones_like(y))
    assert (y.shape, grad.shape) == ((shape[0], shape[2]), shape)
    assert library.report().kernels == {}
