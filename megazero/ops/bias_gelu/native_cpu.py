"""GELU of x + bias by the compiled kernel of csrc/bias_gelu: one pass over memory each way."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.bias_gelu.composed import bias_gelu_torch
from megazero.ops.native import NATIVE, address, rows_of


class _BiasGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        wide_bias = None if bias is None else bias.float().contiguous()
        y = torch.empty_like(x)
        NATIVE.bias_gelu_forward(rows_of(x, x.shape[-1]), address(x), address(wide_bias), address(y))
        ctx.save_for_backward(x, wide_bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, wide_bias = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        NATIVE.bias_gelu_backward(
            rows_of(x, x.shape[-1]), address(x), address(wide_bias), address(grad), address(grad_x)
        )
        # torch sums bf16 in fp32 and rounds once.
        grad_bias = grad_x.view(-1, x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias


def bias_gelu_native_cpu(x: Tensor, bias: Tensor | None, exact: bool = False) -> Tensor:
    """gelu(x + bias); the erf form, and a bias of another type than x, go through torch."""
    if exact or (bias is not None and bias.dtype != x.dtype) or x.dim() == 0:
        return bias_gelu_torch(x, bias, exact)
    return _BiasGELU.apply(x, bias)
