"""Layer norm after a residual add: the public function and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CPU, CUDA, CallFacts, Implementation, Operator, where
from megazero.ops.layer_norm.cuda import add_layer_norm_cuda
from megazero.ops.layer_norm.front import (
    FULL,
    REDUCED,
    layer_norm_native_cpu,
    layer_norm_reduced_cpu,
    layer_norm_torch,
)
from megazero.ops.layer_norm.reference import add_layer_norm_reference
from megazero.ops.native import on_native_cpu
from megazero.ops.residual import check_residual


def add_layer_norm_native_cpu(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """torch's add and layer norm's compiled kernel, in fp32 or bf16 on CPU."""
    total = x + residual
    return layer_norm_native_cpu(total, weight, bias, eps), total


def add_layer_norm_reduced_cpu(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """torch's add, and layer norm in bf16 or fp16 on CPU with parameters' gradients in fp32."""
    total = x + residual
    return layer_norm_reduced_cpu(total, weight, bias, eps), total


def add_layer_norm_torch(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """torch's add and its layer norm."""
    total = x + residual
    return layer_norm_torch(total, weight, bias, eps), total


ADD_LAYER_NORM: Operator[Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]] = Operator(
    "add_layer_norm",
    (
        Implementation("native_cpu", add_layer_norm_native_cpu, on_native_cpu()),
        Implementation("reduced_cpu", add_layer_norm_reduced_cpu, where(CPU, REDUCED)),
        Implementation("torch", add_layer_norm_torch, where(CPU, FULL)),
        Implementation("cuda", add_layer_norm_cuda, on_cuda_kernels()),
        Implementation("torch", add_layer_norm_torch, where(CUDA)),
        Implementation("reference", add_layer_norm_reference),
    ),
)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Layer norm of t = x + residual, for x and residual [..., h] of one dtype; and t itself.

    weight and bias are [h]. t is rounded to x's dtype before it is normalized, so the result is that of an
    add and `layer_norm`. Raises ValueError if residual differs from x in shape or dtype.
    """
    check_residual(x, residual)
    return ADD_LAYER_NORM.choose(CallFacts.of(x)).fn(x, residual, weight, bias, eps)
