"""The public RMSNorm and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.autograd import Gradients, apply
from megazero.ops.chunks import compute_dtype, row_chunks
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CPU, CUDA, CallFacts, Implementation, Operator, where
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of
from megazero.ops.rms_norm.cuda import rms_norm_cuda
from megazero.ops.rms_norm.reference import rms_norm_reference


class _NativeRMSNorm(torch.autograd.Function):
    """The compiled kernels of csrc/rms_norm: the mean and the weight's gradient in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, wide_weight = x.contiguous(), weight.float().contiguous()
        y, scale = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32)
        rows = rows_of(x, x.shape[-1])
        NATIVE.rms_norm_forward(rows, address(x), address(wide_weight), eps, address(y), address(scale))
        ctx.save_for_backward(x, wide_weight, scale)
        ctx.parameter_dtype = weight.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, wide_weight, scale = ctx.saved_tensors
        grad, grad_x, grad_weight = grad.contiguous(), torch.empty_like(x), torch.empty_like(wide_weight)
        tensors = (x, wide_weight, scale, grad, grad_x, grad_weight)
        NATIVE.rms_norm_backward(rows_of(x, x.shape[-1]), *map(address, tensors))
        return grad_x, grad_weight.to(ctx.parameter_dtype), None


def rms_norm_native_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., h] in fp32 or bf16 on CPU; the weight may have any float type."""
    return apply(_NativeRMSNorm, x, weight, eps)


class _ChunkedRMSNorm(torch.autograd.Function):
    """The norm in row chunks that stay in cache; it saves the input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        wide_type = compute_dtype(x.dtype)
        wide_weight = weight.to(wide_type)
        y = torch.empty_like(rows, memory_format=torch.contiguous_format)
        scale = rows.new_empty(rows.shape[0], 1, dtype=wide_type)
        for chunk in row_chunks(x, *rows.shape):
            wide = rows[chunk].to(wide_type)
            mean_square = torch.linalg.vecdot(wide, wide).unsqueeze(-1).div_(rows.shape[1])
            torch.rsqrt(mean_square.add_(eps), out=scale[chunk])
            y[chunk] = (wide * scale[chunk]).mul_(wide_weight)
        ctx.save_for_backward(rows, weight, scale)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """With n = x * scale and g = grad * weight: dx = scale * (g - n * mean(g * n))."""
        rows, weight, scale = ctx.saved_tensors
        wide_type = scale.dtype
        wide_weight = weight.to(wide_type)
        grad_rows = grad.reshape(rows.shape)
        grad_x = torch.empty_like(rows, memory_format=torch.contiguous_format)
        grad_weight = torch.zeros_like(wide_weight)
        for chunk in row_chunks(rows, *rows.shape):
            normed = rows[chunk].to(wide_type) * scale[chunk]
            wide_grad = grad_rows[chunk].to(wide_type)
            product = wide_grad * normed
            grad_weight += product.sum(0)
            mean = (product @ wide_weight).div_(-rows.shape[1]).unsqueeze(-1)
            grad_x[chunk] = (wide_grad * wide_weight).addcmul_(normed, mean).mul_(scale[chunk])
        return grad_x.view(grad.shape), grad_weight.to(weight.dtype), None


def rms_norm_chunked(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., h], chunk by chunk."""
    return apply(_ChunkedRMSNorm, x, weight, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """torch's kernel, which needs one dtype, so a narrower input is widened first."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)


RMS_NORM: Operator[Callable[[Tensor, Tensor, float], Tensor]] = Operator(
    "rms_norm",
    (
        Implementation("native_cpu", rms_norm_native_cpu, on_native_cpu()),
        Implementation("cuda", rms_norm_cuda, on_cuda_kernels()),
        Implementation("torch", rms_norm_torch, where(CUDA)),
        Implementation("chunked", rms_norm_chunked, where(CPU)),
        Implementation("reference", rms_norm_reference),
    ),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., h] divided by its root mean square over h, times weight [h].

    The mean is computed in fp32 even for a bf16 input; the result has x's dtype.
    """
    return RMS_NORM.choose(CallFacts.of(x)).fn(x, weight, eps)
