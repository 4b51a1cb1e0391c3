"""SwiGLU in row chunks that stay in cache; saves its input alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.ops.chunks import compute_dtype, row_chunks


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
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
    def backward(ctx, grad: Tensor) -> Tensor:
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
    """silu(gate) * up of gate_up [..., 2, f], chunk by chunk; [..., f]."""
    return _SwiGLU.apply(gate_up)
