"""RMSNorm after a residual add: the public function and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CPU, CUDA, CallFacts, Implementation, Operator, where
from megazero.ops.native import on_native_cpu
from megazero.ops.residual import check_residual
from megazero.ops.rms_norm.cuda import add_rms_norm_cuda
from megazero.ops.rms_norm.front import rms_norm_chunked, rms_norm_native_cpu, rms_norm_torch
from megazero.ops.rms_norm.reference import add_rms_norm_reference


def add_rms_norm_native_cpu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """torch's add and RMSNorm's compiled kernel, in fp32 or bf16 on CPU."""
    total = x + residual
    return rms_norm_native_cpu(total, weight, eps), total


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """torch's add and its RMSNorm."""
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


def add_rms_norm_chunked(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """torch's add, and RMSNorm chunk by chunk."""
    total = x + residual
    return rms_norm_chunked(total, weight, eps), total


ADD_RMS_NORM: Operator[Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]] = Operator(
    "add_rms_norm",
    (
        Implementation("native_cpu", add_rms_norm_native_cpu, on_native_cpu()),
        Implementation("cuda", add_rms_norm_cuda, on_cuda_kernels()),
        Implementation("torch", add_rms_norm_torch, where(CUDA)),
        Implementation("chunked", add_rms_norm_chunked, where(CPU)),
        Implementation("reference", add_rms_norm_reference),
    ),
)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of t = x + residual, for x and residual [..., h] of one dtype and weight [h]; and t itself.

    t is rounded to x's dtype before it is normalized, so the result is that of an add and `rms_norm`. Raises
    ValueError if residual differs from x in shape or dtype.
    """
    check_residual(x, residual)
    return ADD_RMS_NORM.choose(CallFacts.of(x)).fn(x, residual, weight, eps)
