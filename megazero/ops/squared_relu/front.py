"""The public squared ReLU and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megazero.ops.autograd import apply
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.squared_relu.cuda import squared_relu_cuda
from megazero.ops.squared_relu.reference import squared_relu_reference


class _SquaredReLU(torch.autograd.Function):
    """The activation; it saves only max(x, 0), as backward is 2 max(x, 0) grad, in two passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.clamp(min=0)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        positive: Tensor = ctx.saved_tensors[0]
        return (positive * grad).mul_(2)


def squared_relu_fused(x: Tensor) -> Tensor:
    """max(x, 0)^2 for x of any shape."""
    return apply(_SquaredReLU, x)


SQUARED_RELU: Operator[Callable[[Tensor], Tensor]] = Operator(
    "squared_relu",
    (
        Implementation("cuda", squared_relu_cuda, on_cuda_kernels()),
        Implementation("fused", squared_relu_fused),
        Implementation("reference", squared_relu_reference),
    ),
)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2, elementwise."""
    return SQUARED_RELU.choose(CallFacts.of(x)).fn(x)
