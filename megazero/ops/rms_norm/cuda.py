"""RMSNorm, and the residual add before it, by the kernels of csrc/rms_norm/cuda.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.cuda import CUDA_KERNELS


class _CudaRMSNorm(torch.autograd.Function):
    """The norm; it saves the input and one number per row, and sums over rows in fp32, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernels: KernelLibrary) -> Tensor:
        return _normalize(ctx, x, None, weight, eps, kernels)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        return *_gradients(ctx, grad, None), None, None


class _CudaAddRMSNorm(torch.autograd.Function):
    """The norm of a sum; backward adds the gradient that arrives for the sum in the same pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, kernels: KernelLibrary
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return _normalize(ctx, x, residual.contiguous(), weight, eps, kernels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> Gradients:
        grad_x, grad_weight = _gradients(ctx, grad, grad_total)
        return grad_x, grad_x, grad_weight, None, None


def _normalize(
    ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, kernels: KernelLibrary
) -> tuple[Tensor, Tensor]:
    """The result y and the normalized tensor, which `ctx` keeps."""
    x, wide_weight = x.contiguous(), weight.float().contiguous()
    width = x.shape[-1]
    count = x.numel() // width if width else 0
    total = None if residual is None else torch.empty_like(x)
    y, scale = torch.empty_like(x), x.new_empty(count, dtype=torch.float32)
    kernels.launch("rms_norm_forward", x.dtype, count, width, x, residual, wide_weight, eps, total, y, scale)
    normalized = x if total is None else total
    ctx.save_for_backward(normalized, wide_weight, scale)
    ctx.parameter_dtype, ctx.kernels = weight.dtype, kernels
    return y, normalized


def _gradients(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of the normalized tensor and the weight."""
    x, weight, scale = ctx.saved_tensors
    count, width = scale.numel(), x.shape[-1]
    grad = torch.zeros_like(x) if grad is None else grad.contiguous()
    grad_total = None if grad_total is None else grad_total.contiguous()
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    groups = ctx.kernels.column_groups(count, width)
    partials = weight.new_empty(groups, width)
    tensors = (x, weight, scale, grad, grad_total, grad_x, grad_weight, partials)
    ctx.kernels.launch("rms_norm_backward", x.dtype, count, width, groups, *tensors)
    return grad_x, grad_weight.to(ctx.parameter_dtype)


def rms_norm_cuda(x: Tensor, weight: Tensor, eps: float, kernels: KernelLibrary = CUDA_KERNELS) -> Tensor:
    """RMSNorm of x [..., h] in fp32, fp16 or bf16 on a GPU; the weight may have any float type."""
    return apply(_CudaRMSNorm, x, weight, eps, kernels)


def add_rms_norm_cuda(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, kernels: KernelLibrary = CUDA_KERNELS
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, and x + residual, in one pass over memory."""
    return apply(_CudaAddRMSNorm, x, residual, weight, eps, kernels)
