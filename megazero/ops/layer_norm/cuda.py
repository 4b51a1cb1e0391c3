"""Layer norm, and the residual add before it, by the kernels of csrc/layer_norm/cuda.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.cuda import CUDA_KERNELS


class _CudaLayerNorm(torch.autograd.Function):
    """The norm; it saves the input and two numbers per row, and sums over rows in fp32, in a fixed order."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, kernels: KernelLibrary
    ) -> Tensor:
        return _normalize(ctx, x, None, (weight, bias), eps, kernels)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        return *_gradients(ctx, grad, None), None, None


class _CudaAddLayerNorm(torch.autograd.Function):
    """The norm of a sum; backward adds the gradient that arrives for the sum in the same pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        kernels: KernelLibrary,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return _normalize(ctx, x, residual.contiguous(), (weight, bias), eps, kernels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> Gradients:
        grad_x, grad_weight, grad_bias = _gradients(ctx, grad, grad_total)
        return grad_x, grad_x, grad_weight, grad_bias, None, None


def _normalize(
    ctx: Any,
    x: Tensor,
    residual: Tensor | None,
    parameters: tuple[Tensor, Tensor],
    eps: float,
    kernels: KernelLibrary,
) -> tuple[Tensor, Tensor]:
    """The result y and the normalized tensor, which `ctx` keeps."""
    x = x.contiguous()
    weight, bias = (parameter.float().contiguous() for parameter in parameters)
    width = x.shape[-1]
    count = x.numel() // width if width else 0
    total, y = None if residual is None else torch.empty_like(x), torch.empty_like(x)
    mean, scale = (x.new_empty(count, dtype=torch.float32) for _ in range(2))
    tensors = (total, y, mean, scale)
    kernels.launch("layer_norm_forward", x.dtype, count, width, x, residual, weight, bias, eps, *tensors)
    normalized = x if total is None else total
    ctx.save_for_backward(normalized, weight, mean, scale)
    ctx.parameter_dtypes, ctx.kernels = [parameter.dtype for parameter in parameters], kernels
    return y, normalized


def _gradients(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the normalized tensor, the weight and the bias."""
    x, weight, mean, scale = ctx.saved_tensors
    count, width = scale.numel(), x.shape[-1]
    grad = torch.zeros_like(x) if grad is None else grad.contiguous()
    grad_total = None if grad_total is None else grad_total.contiguous()
    grad_x, grad_parameters = torch.empty_like(x), weight.new_empty(2, width)
    groups = ctx.kernels.column_groups(count, width)
    partials = weight.new_empty(groups, 2, width)
    tensors = (x, weight, mean, scale, grad, grad_total, grad_x, grad_parameters, partials)
    ctx.kernels.launch("layer_norm_backward", x.dtype, count, width, groups, *tensors)
    grad_weight, grad_bias = (
        summed.to(dtype) for summed, dtype in zip(grad_parameters, ctx.parameter_dtypes, strict=True)
    )
    return grad_x, grad_weight, grad_bias


def layer_norm_cuda(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, kernels: KernelLibrary = CUDA_KERNELS
) -> Tensor:
    """Layer norm of x [..., h] in fp32, fp16 or bf16 on a GPU; weight and bias may have any float type."""
    return apply(_CudaLayerNorm, x, weight, bias, eps, kernels)


def add_layer_norm_cuda(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    kernels: KernelLibrary = CUDA_KERNELS,
) -> tuple[Tensor, Tensor]:
    """Layer norm of x + residual, and x + residual, in one pass over memory."""
    return apply(_CudaAddLayerNorm, x, residual, weight, bias, eps, kernels)
