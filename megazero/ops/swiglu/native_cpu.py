"""SwiGLU by the compiled kernel of csrc/swiglu: one pass over memory each way; saves its input alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.native import NATIVE, address, rows_of


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        y = gate_up.new_empty(*gate_up.shape[:-2], gate_up.shape[-1])
        NATIVE.swiglu_forward(rows_of(y, y.shape[-1]), address(gate_up), address(y))
        ctx.save_for_backward(gate_up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad, grad_gate_up = grad.contiguous(), torch.empty_like(gate_up)
        rows = rows_of(grad, gate_up.shape[-1])
        NATIVE.swiglu_backward(rows, address(gate_up), address(grad), address(grad_gate_up))
        return grad_gate_up


def swiglu_native_cpu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [..., 2, f] in fp32 or bf16 on CPU; [..., f]."""
    if gate_up.shape[-2] != 2:
        raise ValueError(
            f"`gate_up` must be [..., 2, f], but is {list(gate_up.shape)}; "
            "stack gate and up before the last dim."
        )
    return _SwiGLU.apply(gate_up)
