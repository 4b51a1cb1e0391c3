"""Layer normalization over the last dim (Ba, Kiros & Hinton 2016), also of a sum."""

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

_REDUCED = frozenset({torch.bfloat16, torch.float16})
_FULL = frozenset({torch.float32, torch.float64})


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dim; the biased variance."""
    wide = x.to(compute_dtype(x.dtype))
    centered = wide - wide.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    return (centered * torch.rsqrt(variance + eps) * weight + bias).to(x.dtype)


def _native_forward(x: Tensor, residual: Tensor | None, parameters: list[Tensor], eps: float) -> Normalized:
    y = torch.empty_like(x)
    mean, scale = torch.empty(2, *x.shape[:-1], dtype=torch.float32)
    given, made = map(address, (x, *parameters)), map(address, (y, mean, scale))
    NATIVE.layer_norm_forward(rows_of(x, x.shape[-1]), *given, eps, *made)
    return x, y, [mean, scale]


def _native_backward(
    x: Tensor, weight: Tensor, statistics: list[Tensor], grad: Tensor, grad_total: Tensor | None
) -> list[Tensor]:
    grad_x = torch.empty_like(x)
    grads = torch.empty(2, x.shape[-1], dtype=torch.float32).unbind()
    tensors = (x, weight, *statistics, grad, grad_x, *grads)
    NATIVE.layer_norm_backward(rows_of(x, x.shape[-1]), *map(address, tensors))
    return [grad_x, *grads]


def _reduced_forward(x: Tensor, residual: Tensor | None, parameters: list[Tensor], eps: float) -> Normalized:
    y, mean, scale = torch.native_layer_norm(x, x.shape[-1:], parameters[0], parameters[1], eps)
    return x, y, [mean, scale]


def _reduced_backward(
    x: Tensor, weight: Tensor, statistics: list[Tensor], grad: Tensor, grad_total: Tensor | None
) -> list[Tensor]:
    """torch's CPU backward, with the parameters' gradients summed in fp32.

    torch sums them over tokens in the input's own dtype: over 8,192 tokens in bf16 the bias's gradient was
    off by 40% (torch 2.13). torch's forward is also faster with fp32 parameters.
    """
    mean, scale = statistics
    h = x.shape[-1]
    grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(
        grad, x, x.shape[-1:], mean, scale, weight, None, [True, False, False]
    )
    rows, grad_rows = x.view(-1, h), grad.view(-1, h)
    means, scales = mean.view(-1, 1).float(), scale.view(-1, 1).float()
    grad_weight, grad_bias = torch.zeros(2, h)
    for chunk in row_chunks(x, *rows.shape):
        wide_grad = grad_rows[chunk].float()
        grad_bias += wide_grad.sum(0)
        normed = rows[chunk].float().sub_(means[chunk]).mul_(scales[chunk])
        grad_weight += normed.mul_(wide_grad).sum(0)
    return [grad_x, grad_weight, grad_bias]


_NATIVE = NormKernel(_native_forward, _native_backward)
_REDUCING = NormKernel(_reduced_forward, _reduced_backward)


def layer_norm_native_cpu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x [..., h] in fp32 or bf16 on CPU; weight and bias may have any float type."""
    return normalized(_NATIVE, eps, x, weight, bias)


def layer_norm_reduced_cpu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x [..., h] in bf16 or fp16 on CPU."""
    return normalized(_REDUCING, eps, x, weight, bias)


def layer_norm_torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """torch's kernel."""
    if weight.dtype == x.dtype:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    # torch's CUDA kernel rejects weights wider than the input, so the input is widened.
    wide = F.layer_norm(x.to(weight.dtype), x.shape[-1:], weight, bias, eps)
    return wide.to(x.dtype)


def layer_norm_cuda(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, kernels: KernelLibrary | None = None
) -> Tensor:
    """Layer norm of x [..., h] in fp32, fp16 or bf16 on a GPU; weight and bias may have any float type."""
    return normalized(on_gpu("layer_norm", kernels), eps, x, weight, bias)


def add_layer_norm_cuda(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    included: Tensor | None = None,
    kernels: KernelLibrary | None = None,
) -> Pair:
    """Layer norm of x + residual, and x + residual, in one pass over memory."""
    return added(on_gpu("layer_norm", kernels), eps, x, residual, included, weight, bias)


LAYER_NORM: Operator[Callable[[Tensor, Tensor, Tensor, float], Tensor]] = Operator(
    "layer_norm",
    (
        Implementation("native_cpu", layer_norm_native_cpu, on_native_cpu()),
        Implementation("reduced_cpu", layer_norm_reduced_cpu, where(CPU, _REDUCED)),
        Implementation("torch", layer_norm_torch, where(CPU, _FULL)),
        Implementation("cuda", layer_norm_cuda, on_cuda_kernels()),
        Implementation("torch", layer_norm_torch, where(CUDA)),
        planned(layer_norm_cuda),
        Implementation("reference", layer_norm_reference),
    ),
    examples=norm_examples("layer_norm", 2, 160),
)
ADD_LAYER_NORM = of_sums(LAYER_NORM, add_layer_norm_cuda, norm_examples("add_layer_norm", 2, 160))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., h] normalized over h to mean 0 and variance 1, then times weight [h] plus bias [h].

    Statistics are computed in fp32 even for a bf16 input; the result has x's dtype.
    """
    return LAYER_NORM.choose(CallFacts.of(x)).fn(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    included: Tensor | None = None,
) -> Pair:
    """Layer norm of t = x + residual, for x and residual [..., h] of one dtype; and t itself.

    weight and bias are [h]. t is rounded to x's dtype before it is normalized, so the result is that of an
    add and `layer_norm`. Without a residual t is x; a kernel then adds up both of its gradients. `included`
    is a bias [h] that x contains already; backward computes its gradient too. Raises ValueError if residual
    differs from x in shape or dtype.
    """
    check_residual(x, residual)
    row = ADD_LAYER_NORM.choose(CallFacts.of(x))
    x, included = handed(row, x, included)
    return row.fn(x, residual, weight, bias, eps, included=included)
