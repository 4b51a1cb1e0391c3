"""RMSNorm by the compiled kernels of csrc/rms_norm: the mean and the weight's gradient in fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.native import NATIVE, address, rows_of


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, wide_weight = x.contiguous(), weight.float().contiguous()
        y, scale = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32)
        rows = rows_of(x, x.shape[-1])
        NATIVE.rms_norm_forward(rows, address(x), address(wide_weight), eps, address(y), address(scale))
        ctx.save_for_backward(x, wide_weight, scale)
        ctx.parameter_dtype = weight.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, wide_weight, scale = ctx.saved_tensors
        grad, grad_x, grad_weight = grad.contiguous(), torch.empty_like(x), torch.empty_like(wide_weight)
        tensors = (x, wide_weight, scale, grad, grad_x, grad_weight)
        NATIVE.rms_norm_backward(rows_of(x, x.shape[-1]), *map(address, tensors))
        return grad_x, grad_weight.to(ctx.parameter_dtype), None


def rms_norm_native_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., h] in fp32 or bf16 on CPU; weight of any float type."""
    return _RMSNorm.apply(x, weight, eps)
