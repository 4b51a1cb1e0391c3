"""Biases that a tensor contains already, whose gradients its reader computes.

A linear layer adds its bias within its product. The bias's gradient is the sum of the result's gradient over
rows, and on a GPU the kernel that computes that gradient adds it up along the way: it need not be read again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.ops.autograd import Context, Gradients, apply
from megazero.ops.cuda import CUDA_DTYPES, cuda_built
from megazero.ops.dispatch import CallFacts, Implementation


class Included(NamedTuple):
    """A bias [h] that a tensor [..., h] contains already, but whose gradient the tensor's reader computes."""

    bias: Tensor


class _Included(torch.autograd.Function):
    """The tensor itself."""

    @staticmethod
    def forward(ctx: Context[torch.dtype], x: Tensor, bias: Tensor) -> Tensor:
        ctx.kept = bias.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context[torch.dtype], grad: Tensor) -> Gradients:
        return grad, grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.kept)


def makes_sums(x: Tensor) -> bool:
    """Whether the kernels that run for x also sum gradients over rows."""
    facts = CallFacts.of(x)
    if facts.dtype not in CUDA_DTYPES or torch.compiler.is_compiling():
        return False
    return facts.device == "meta" or (facts.device == "cuda" and cuda_built())


def settled(x: Tensor, bias: Tensor | None) -> Tensor:
    """x, whose backward also computes the gradient of the bias that it includes, by a separate sum."""
    return x if bias is None else apply(_Included, x, bias)


def handed(row: Implementation[Any], x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x and the bias that it includes, for an implementation; None for the bias unless the implementation
    sums.
    """
    if bias is None or row.name in ("cuda", "planned"):
        return x, bias
    return settled(x, bias), None
