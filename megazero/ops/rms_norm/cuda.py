"""RMSNorm by the kernels of csrc/rms_norm/cuda.cu."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.cuda import CUDA_KERNELS


class _CudaRMSNorm(torch.autograd.Function):
    """Saves the input and one number per row; the weight's gradient is added up in fp32, in a fixed order."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, kernels: KernelLibrary) -> Tensor:
        x, wide_weight = x.contiguous(), weight.float().contiguous()
        width = x.shape[-1]
        count = x.numel() // width if width else 0
        y, scale = torch.empty_like(x), x.new_empty(count, dtype=torch.float32)
        kernels.launch("rms_norm_forward", x.dtype, count, width, x, wide_weight, eps, y, scale)
        ctx.save_for_backward(x, wide_weight, scale)
        ctx.parameter_dtype, ctx.kernels = weight.dtype, kernels
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        count, width = scale.numel(), x.shape[-1]
        grad, grad_x, grad_weight = grad.contiguous(), torch.empty_like(x), torch.empty_like(weight)
        groups = ctx.kernels.column_groups(count, width)
        partials = weight.new_empty(groups, width)
        tensors = (x, weight, scale, grad, grad_x, grad_weight, partials)
        ctx.kernels.launch("rms_norm_backward", x.dtype, count, width, groups, *tensors)
        return grad_x, grad_weight.to(ctx.parameter_dtype), None, None


def rms_norm_cuda(x: Tensor, weight: Tensor, eps: float, kernels: KernelLibrary = CUDA_KERNELS) -> Tensor:
    """RMSNorm of x [..., h] in fp32, fp16 or bf16 on a GPU; the weight may have any float type."""
    return _CudaRMSNorm.apply(x, weight, eps, kernels)
