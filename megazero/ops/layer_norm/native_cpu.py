"""Layer norm by the compiled kernels of csrc/layer_norm: statistics and parameter gradients in fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.native import NATIVE, address, rows_of


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        wide_weight, wide_bias = weight.float().contiguous(), bias.float().contiguous()
        rows, y = rows_of(x, x.shape[-1]), torch.empty_like(x)
        mean, scale = torch.empty(2, *x.shape[:-1], dtype=torch.float32)
        NATIVE.layer_norm_forward(
            rows, *map(address, (x, wide_weight, wide_bias)), eps, *map(address, (y, mean, scale))
        )
        ctx.save_for_backward(x, wide_weight, mean, scale)
        ctx.parameter_dtype = weight.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, wide_weight, mean, scale = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), torch.empty_like(x)
        grad_weight, grad_bias = torch.empty(2, x.shape[-1], dtype=torch.float32)
        tensors = (x, wide_weight, mean, scale, grad, grad_x, grad_weight, grad_bias)
        NATIVE.layer_norm_backward(rows_of(x, x.shape[-1]), *map(address, tensors))
        return grad_x, grad_weight.to(ctx.parameter_dtype), grad_bias.to(ctx.parameter_dtype), None


def layer_norm_native_cpu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x [..., h] in fp32 or bf16 on CPU; weight and bias of any float type."""
    return _LayerNorm.apply(x, weight, bias, eps)
