"""The public SwiGLU and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.autograd import apply
from megazero.ops.chunks import compute_dtype, row_chunks
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of
from megazero.ops.swiglu.cuda import swiglu_cuda
from megazero.ops.swiglu.reference import swiglu_reference


class _NativeSwiGLU(torch.autograd.Function):
    """The compiled kernel of csrc/swiglu: one pass over memory each way; saves only its input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        y = gate_up.new_empty(*gate_up.shape[:-2], gate_up.shape[-1])
        NATIVE.swiglu_forward(rows_of(y, y.shape[-1]), address(gate_up), address(y))
        ctx.save_for_backward(gate_up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad, grad_gate_up = grad.contiguous(), torch.empty_like(gate_up)
        rows = rows_of(grad, gate_up.shape[-1])
        NATIVE.swiglu_backward(rows, address(gate_up), address(grad), address(grad_gate_up))
        return grad_gate_up


def swiglu_native_cpu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2, f] in fp32 or bf16 on CPU; returns [..., f]."""
    return apply(_NativeSwiGLU, gate_up)


class _ChunkedSwiGLU(torch.autograd.Function):
    """The activation in row chunks that stay in cache; it saves only its input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[-1]
        pairs = gate_up.reshape(-1, 2, width)
        y = pairs.new_empty(pairs.shape[0], width)
        wide_type = compute_dtype(gate_up.dtype)
        for chunk in row_chunks(gate_up, pairs.shape[0], width):
            gate, up = pairs[chunk].to(wide_type).unbind(1)
            y[chunk] = F.silu(gate).mul_(up)
        return y.view(*gate_up.shape[:-2], width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """With s = sigmoid(gate): d gate = grad up s (1 + gate (1 - s)), d up = grad gate s."""
        (gate_up,) = ctx.saved_tensors
        width = gate_up.shape[-1]
        pairs = gate_up.reshape(-1, 2, width)
        grad_rows = grad.reshape(-1, width)
        grad_pairs = torch.empty_like(pairs, memory_format=torch.contiguous_format)
        wide_type = compute_dtype(gate_up.dtype)
        for chunk in row_chunks(gate_up, pairs.shape[0], width):
            gate, up = pairs[chunk].to(wide_type).unbind(1)
            wide_grad = grad_rows[chunk].to(wide_type)
            grad_pairs[chunk, 0] = torch.ops.aten.silu_backward(wide_grad * up, gate)
            grad_pairs[chunk, 1] = F.silu(gate).mul_(wide_grad)
        return grad_pairs.view(gate_up.shape)


def swiglu_chunked(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2, f], chunk by chunk; returns [..., f]."""
    return apply(_ChunkedSwiGLU, gate_up)


SWIGLU: Operator[Callable[[Tensor], Tensor]] = Operator(
    "swiglu",
    (
        Implementation("native_cpu", swiglu_native_cpu, on_native_cpu()),
        Implementation("cuda", swiglu_cuda, on_cuda_kernels()),
        Implementation("chunked", swiglu_chunked),
        Implementation("reference", swiglu_reference),
    ),
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
