"""The public layer norm and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.autograd import Gradients, apply
from megazero.ops.chunks import row_chunks
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CPU, CUDA, CallFacts, Implementation, Operator, where
from megazero.ops.layer_norm.cuda import layer_norm_cuda
from megazero.ops.layer_norm.reference import layer_norm_reference
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of

REDUCED = frozenset({torch.bfloat16, torch.float16})
FULL = frozenset({torch.float32, torch.float64})


class _NativeLayerNorm(torch.autograd.Function):
    """The compiled kernels of csrc/layer_norm: statistics and parameter gradients in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
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
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, wide_weight, mean, scale = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), torch.empty_like(x)
        grad_weight, grad_bias = torch.empty(2, x.shape[-1], dtype=torch.float32)
        tensors = (x, wide_weight, mean, scale, grad, grad_x, grad_weight, grad_bias)
        NATIVE.layer_norm_backward(rows_of(x, x.shape[-1]), *map(address, tensors))
        return grad_x, grad_weight.to(ctx.parameter_dtype), grad_bias.to(ctx.parameter_dtype), None


def layer_norm_native_cpu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x [..., h] in fp32 or bf16 on CPU; weight and bias may have any float type."""
    return apply(_NativeLayerNorm, x, weight, bias, eps)


class _ReducedLayerNorm(torch.autograd.Function):
    """torch's kernels, with the parameters' gradients summed in fp32.

    torch's CPU backward sums them over tokens in the input's own dtype: over 8,192 tokens in bf16 the bias's
    gradient was off by 40% (torch 2.13). torch's forward is also faster with fp32 parameters.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide_weight = weight.float()
        y, mean, scale = torch.native_layer_norm(x, x.shape[-1:], wide_weight, bias.float(), eps)
        ctx.save_for_backward(x, wide_weight, mean, scale)
        ctx.parameter_dtype = weight.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, wide_weight, mean, scale = ctx.saved_tensors
        h = x.shape[-1]
        grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[-1:], mean, scale, wide_weight, None, [True, False, False]
        )
        rows, grad_rows = x.reshape(-1, h), grad.reshape(-1, h)
        means, scales = mean.view(-1, 1).float(), scale.view(-1, 1).float()
        grad_weight, grad_bias = torch.zeros(2, h)
        for chunk in row_chunks(x, *rows.shape):
            wide_grad = grad_rows[chunk].float()
            grad_bias += wide_grad.sum(0)
            normed = rows[chunk].float().sub_(means[chunk]).mul_(scales[chunk])
            grad_weight += normed.mul_(wide_grad).sum(0)
        return grad_x, grad_weight.to(ctx.parameter_dtype), grad_bias.to(ctx.parameter_dtype), None


def layer_norm_reduced_cpu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x [..., h] in bf16 or fp16 on CPU."""
    return apply(_ReducedLayerNorm, x, weight, bias, eps)


def layer_norm_torch(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """torch's kernel."""
    if weight.dtype == x.dtype:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    # torch's CUDA kernel rejects weights wider than the input, so the input is widened.
    wide = F.layer_norm(x.to(weight.dtype), x.shape[-1:], weight, bias, eps)
    return wide.to(x.dtype)


LAYER_NORM: Operator[Callable[[Tensor, Tensor, Tensor, float], Tensor]] = Operator(
    "layer_norm",
    (
        Implementation("native_cpu", layer_norm_native_cpu, on_native_cpu()),
        Implementation("reduced_cpu", layer_norm_reduced_cpu, where(CPU, REDUCED)),
        Implementation("torch", layer_norm_torch, where(CPU, FULL)),
        Implementation("cuda", layer_norm_cuda, on_cuda_kernels()),
        Implementation("torch", layer_norm_torch, where(CUDA)),
        Implementation("reference", layer_norm_reference),
    ),
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., h] normalized over h to mean 0 and variance 1, then times weight [h] plus bias [h].

    Statistics are computed in fp32 even for a bf16 input; the result has x's dtype.
    """
    return LAYER_NORM.choose(CallFacts.of(x)).fn(x, weight, bias, eps)
