"""SwiGLU, the gated activation silu(gate) * up (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Activation, ActivationKernel, apply
from megazero.ops.chunks import compute_dtype, row_chunks
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels, planned
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.example import Example, Traffic
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up for gate_up [..., 2, f]."""
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).unbind(-2)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def _result(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-2], gate_up.shape[-1])


def _native_forward(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    y = _result(gate_up)
    NATIVE.swiglu_forward(rows_of(y, y.shape[-1]), address(gate_up), address(y))
    return y, gate_up


def _native_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    grad_gate_up = torch.empty_like(gate_up)
    rows = rows_of(grad, gate_up.shape[-1])
    NATIVE.swiglu_backward(rows, address(gate_up), address(grad), address(grad_gate_up))
    return grad_gate_up


def _chunked_forward(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    y = _result(gate_up)
    pairs, rows = (x.view(-1, *x.shape[x.dim() - d :]) for x, d in ((gate_up, 2), (y, 1)))
    for chunk in row_chunks(gate_up, *rows.shape):
        gate, up = pairs[chunk].to(compute_dtype(y.dtype)).unbind(1)
        rows[chunk] = F.silu(gate).mul_(up)
    return y, gate_up


def _chunked_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """With s = sigmoid(gate): d gate = grad up s (1 + gate (1 - s)), d up = grad gate s."""
    pairs, rows = gate_up.view(-1, 2, gate_up.shape[-1]), grad.view(-1, gate_up.shape[-1])
    grad_pairs = torch.empty_like(pairs)
    for chunk in row_chunks(gate_up, *rows.shape):
        gate, up = pairs[chunk].to(compute_dtype(grad.dtype)).unbind(1)
        wide_grad = rows[chunk].to(gate.dtype)
        grad_pairs[chunk, 0] = torch.ops.aten.silu_backward(wide_grad * up, gate)
        grad_pairs[chunk, 1] = F.silu(gate).mul_(wide_grad)
    return grad_pairs.view(gate_up.shape)


def _on_gpu(library: KernelLibrary) -> ActivationKernel:
    def forward(gate_up: Tensor) -> tuple[Tensor, Tensor]:
        y = _result(gate_up)
        count, width = y.numel() // max(y.shape[-1], 1), y.shape[-1]
        library.launch("swiglu_forward", y.dtype, count, width, gate_up, y)
        return y, gate_up

    def backward(gate_up: Tensor, grad: Tensor) -> Tensor:
        grad_gate_up, width = torch.empty_like(gate_up), gate_up.shape[-1]
        count = grad.numel() // max(width, 1)
        library.launch("swiglu_backward", grad.dtype, count, width, gate_up, grad, grad_gate_up)
        return grad_gate_up

    return ActivationKernel(forward, backward)


_NATIVE = ActivationKernel(_native_forward, _native_backward)
_CHUNKED = ActivationKernel(_chunked_forward, _chunked_backward)


def swiglu_native_cpu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2, f] in fp32 or bf16 on CPU; returns [..., f]."""
    return apply(Activation, gate_up, _NATIVE)


def swiglu_cuda(gate_up: Tensor, kernels: KernelLibrary | None = None) -> Tensor:
    """silu(gate) * up for gate_up [..., 2, f] in fp32, fp16 or bf16 on a GPU; returns [..., f]."""
    return apply(Activation, gate_up, _on_gpu(kernels or cuda_kernels()))


def swiglu_chunked(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2, f], in row chunks that stay in cache; returns [..., f]."""
    return apply(Activation, gate_up, _CHUNKED)


def _examples() -> Iterator[Example]:
    for shape in ((3, 2, 5), (1, 2, 1), (257, 2, 2, 33), (0, 2, 4)):
        for scale in (1.0, 60.0):
            yield Example(f"{shape} x {scale}", (shape,), lambda f, x: f(x), scale)

    def moves(dtype: torch.dtype) -> dict[str, int]:
        rows = 96 * 1024 * dtype.itemsize
        return {"swiglu_forward": 3 * rows, "swiglu_backward": 5 * rows}

    yield Example("swiglu", ((96, 2, 1024),), lambda f, x: f(x), traffic=Traffic(moves))


SWIGLU: Operator[Callable[[Tensor], Tensor]] = Operator(
    "swiglu",
    (
        Implementation("native_cpu", swiglu_native_cpu, on_native_cpu()),
        Implementation("cuda", swiglu_cuda, on_cuda_kernels()),
        planned(swiglu_cuda),
        Implementation("chunked", swiglu_chunked),
        Implementation("reference", swiglu_reference),
    ),
    examples=_examples,
)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2, f], gate first; returns [..., f].

    Raises ValueError for any other shape.
    """
    if gate_up.shape[-2] != 2:
        raise ValueError(
            f"`gate_up` must be [..., 2, f], but is {list(gate_up.shape)}; "
            "stack gate and up before the last dim."
        )
    return SWIGLU.choose(CallFacts.of(gate_up)).fn(gate_up)
