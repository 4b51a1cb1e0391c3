"""The public bias + GELU and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.autograd import Gradients, apply
from megazero.ops.bias_gelu.cuda import bias_gelu_cuda
from megazero.ops.bias_gelu.reference import bias_gelu_reference
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator, kinds_of_calls
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of


@dataclass(frozen=True)
class GeluFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        exact: whether the erf form is used, rather than the tanh form.
        mixed: whether the bias has a different dtype from x.
    """

    exact: bool
    mixed: bool


class _NativeBiasGELU(torch.autograd.Function):
    """The compiled kernel of csrc/bias_gelu: one pass over memory each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        wide_bias = None if bias is None else bias.float().contiguous()
        y = torch.empty_like(x)
        NATIVE.bias_gelu_forward(rows_of(x, x.shape[-1]), address(x), address(wide_bias), address(y))
        ctx.save_for_backward(x, wide_bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, wide_bias = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        NATIVE.bias_gelu_backward(
            rows_of(x, x.shape[-1]), address(x), address(wide_bias), address(grad), address(grad_x)
        )
        # torch adds bf16 up in fp32 and rounds once.
        grad_bias = grad_x.view(-1, x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias


def bias_gelu_native_cpu(x: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
    """The tanh form of gelu(x + bias) on CPU, for x [..., f] and bias [f] of one dtype, fp32 or bf16."""
    assert not exact
    return apply(_NativeBiasGELU, x, bias)


def bias_gelu_torch(x: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
    """gelu(x + bias) by torch's own operators, in two passes."""
    z = x if bias is None else x + bias
    return F.gelu(z, approximate="none" if exact else "tanh")


BIAS_GELU: Operator[Callable[[Tensor, Tensor | None, bool], Tensor]] = Operator(
    "bias_gelu",
    (
        Implementation("native_cpu", bias_gelu_native_cpu, on_native_cpu(exact=False, mixed=False)),
        Implementation("cuda", bias_gelu_cuda, on_cuda_kernels(mixed=False)),
        Implementation("torch", bias_gelu_torch),
        Implementation("reference", bias_gelu_reference),
    ),
    kinds_of_calls(GeluFacts, exact=(False, True), mixed=(False, True)),
)


def bias_gelu(x: Tensor, bias: Tensor | None, exact: bool = False) -> Tensor:
    """gelu(x + bias) for x [..., f] and bias [f] or None; the tanh form unless `exact`."""
    facts = GeluFacts.of(x, exact=exact, mixed=bias is not None and bias.dtype != x.dtype)
    return BIAS_GELU.choose(facts).fn(x, bias, exact)
