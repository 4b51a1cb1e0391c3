"""Root-mean-square normalization over the last dim (Zhang & Sennrich 2019), also of a sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.chunks import compute_dtype, row_chunks
from megazero.ops.cuda import on_cuda_kernels, planned
from megazero.ops.dispatch import CPU, CUDA, CallFacts, Implementation, Operator, where
from megazero.ops.included import handed
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of
from megazero.ops.norm import (
    Normalized,
    NormKernel,
    Pair,
    added,
    check_residual,
    norm_examples,
    normalized,
    of_sums,
    on_gpu,
)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim."""
    wide = x.to(compute_dtype(x.dtype))
    mean_square = wide.square().mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps) * weight).to(x.dtype)


def _native_forward(x: Tensor, residual: Tensor | None, parameters: list[Tensor], eps: float) -> Normalized:
    y, scale = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32)
    rows = rows_of(x, x.shape[-1])
    NATIVE.rms_norm_forward(rows, address(x), address(parameters[0]), eps, address(y), address(scale))
    return x, y, [scale]


def _native_backward(
    x: Tensor, weight: Tensor, statistics: list[Tensor], grad: Tensor, grad_total: Tensor | None
) -> list[Tensor]:
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    tensors = (x, weight, *statistics, grad, grad_x, grad_weight)
    NATIVE.rms_norm_backward(rows_of(x, x.shape[-1]), *map(address, tensors))
    return [grad_x, grad_weight]


def _chunked_forward(x: Tensor, residual: Tensor | None, parameters: list[Tensor], eps: float) -> Normalized:
    rows = x.view(-1, x.shape[-1]) if x.numel() else x.reshape(0, x.shape[-1])
    y, (weight,) = torch.empty_like(rows), parameters
    scale = rows.new_empty(rows.shape[0], 1, dtype=weight.dtype)
    for chunk in row_chunks(x, *rows.shape):
        wide = rows[chunk].to(weight.dtype)
        mean_square = torch.linalg.vecdot(wide, wide).unsqueeze(-1).div_(rows.shape[1])
        torch.rsqrt(mean_square.add_(eps), out=scale[chunk])
        y[chunk] = (wide * scale[chunk]).mul_(weight)
    return x, y.view(x.shape), [scale]


def _chunked_backward(
    x: Tensor, weight: Tensor, statistics: list[Tensor], grad: Tensor, grad_total: Tensor | None
) -> list[Tensor]:
    """With n = x * scale and g = grad * weight: dx = scale * (g - n * mean(g * n))."""
    (scale,) = statistics
    rows, grad_rows = (tensor.reshape(scale.shape[0], x.shape[-1]) for tensor in (x, grad))
    grad_x, grad_weight = torch.empty_like(rows), torch.zeros_like(weight)
    for chunk in row_chunks(rows, *rows.shape):
        normed = rows[chunk].to(scale.dtype) * scale[chunk]
        wide_grad = grad_rows[chunk].to(scale.dtype)
        product = wide_grad * normed
        grad_weight += product.sum(0)
        mean = (product @ weight).div_(-rows.shape[1]).unsqueeze(-1)
        grad_x[chunk] = (wide_grad * weight).addcmul_(normed, mean).mul_(scale[chunk])
    return [grad_x.view(x.shape), grad_weight]


_NATIVE = NormKernel(_native_forward, _native_backward)
_CHUNKED = NormKernel(_chunked_forward, _chunked_backward)


def rms_norm_native_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., h] in fp32 or bf16 on CPU; the weight may have any float type."""
    return normalized(_NATIVE, eps, x, weight)


def rms_norm_chunked(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., h], in row chunks that stay in cache."""
    return normalized(_CHUNKED, eps, x, weight)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """torch's kernel, which needs one dtype, so a narrower input is widened first."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)


def rms_norm_cuda(x: Tensor, weight: Tensor, eps: float, kernels: KernelLibrary | None = None) -> Tensor:
    """RMSNorm of x [..., h] in fp32, fp16 or bf16 on a GPU; the weight may have any float type."""
    return normalized(on_gpu("rms_norm", kernels), eps, x, weight)


def add_rms_norm_cuda(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    included: Tensor | None = None,
    kernels: KernelLibrary | None = None,
) -> Pair:
    """RMSNorm of x + residual, and x + residual, in one pass over memory."""
    return added(on_gpu("rms_norm", kernels), eps, x, residual, included, weight)


RMS_NORM: Operator[Callable[[Tensor, Tensor, float], Tensor]] = Operator(
    "rms_norm",
    (
        Implementation("native_cpu", rms_norm_native_cpu, on_native_cpu()),
        Implementation("cuda", rms_norm_cuda, on_cuda_kernels()),
        Implementation("torch", rms_norm_torch, where(CUDA)),
        planned(rms_norm_cuda),
        Implementation("chunked", rms_norm_chunked, where(CPU)),
        Implementation("reference", rms_norm_reference),
    ),
    examples=norm_examples("rms_norm", 1, 96),
)
ADD_RMS_NORM = of_sums(RMS_NORM, add_rms_norm_cuda, norm_examples("add_rms_norm", 1, 96))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., h] divided by its root mean square over h, times weight [h].

    The mean is computed in fp32 even for a bf16 input; the result has x's dtype.
    """
    return RMS_NORM.choose(CallFacts.of(x)).fn(x, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, included: Tensor | None = None
) -> Pair:
    """RMSNorm of t = x + residual, for x and residual [..., h] of one dtype and weight [h]; and t itself.

    t is rounded to x's dtype before it is normalized, so the result is that of an add and `rms_norm`. Without
    a residual t is x; a kernel then adds up both of its gradients. `included` is a bias [h] that x contains
    already; backward computes its gradient too. Raises ValueError if residual differs from x in shape or
    dtype.
    """
    check_residual(x, residual)
    row = ADD_RMS_NORM.choose(CallFacts.of(x))
    x, included = handed(row, x, included)
    return row.fn(x, residual, weight, eps, included=included)
