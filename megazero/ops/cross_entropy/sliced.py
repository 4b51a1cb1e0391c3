"""Vocab-parallel cross-entropy around two passes over a rank's logits, one forward and one backward.

Forward keeps a running maximum per slice instead of agreeing on it first (the online softmax of
Milakov & Gimelshein 2018), so the ranks reduce three numbers per token and the logits are read once.
Saved: the logits themselves and one number per token. What padding columns hold does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.autograd import Gradients
from megazero.ops.reduce_group import ReduceGroup


@dataclass(frozen=True)
class SlicePasses:
    """The two passes of one rank over its slice of the logits, [rows, width] of which `columns` count.

    local: int64 [rows], the target's column here, or -1 where another rank holds it.
    statistics(logits, columns, local): each row's maximum (at least the lowest number of its type), its
        sum of exp(logit - maximum), and the target's logit or 0; in the dtype of the loss.
    gradient(logits, columns, local, normalizer, grad, out): writes grad * (exp(logit - normalizer) -
        one_hot(local)), 0 in the padding, to `out`, which is like the logits or the logits themselves;
        normalizer and grad [rows] in the dtype of the loss.
    Logits are contiguous.
    """

    statistics: Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[[Tensor, int, Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class SliceUse:
    """The passes, and whether backward may write the gradient over the logits."""

    passes: SlicePasses
    overwrite: bool = False


class SlicedCrossEntropy(torch.autograd.Function):
    """Loss of each token of logits [..., v/tp], and back."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        group: ReduceGroup,
        vocab_start: int,
        vocab_size: int,
        how: SliceUse,
    ) -> Tensor:
        """The loss, shaped as target; see `vocab_parallel_cross_entropy`."""
        padded = logits.shape[-1]
        columns = min(max(vocab_size - vocab_start, 0), padded)
        rows = logits.reshape(-1, padded).contiguous()
        held = (target >= vocab_start) & (target < vocab_start + columns)
        local = torch.where(held, target - vocab_start, -1).view(-1)
        maximum, total, picked = how.passes.statistics(rows, columns, local)
        slice_maximum = maximum.clone()
        group.all_reduce(maximum, op="max")
        sums = torch.stack((total * torch.exp(slice_maximum - maximum), picked))
        group.all_reduce(sums, op="sum")
        normalizer = sums[0].log_().add_(maximum)
        normalizer.masked_fill_(((target < 0) | (target >= vocab_size)).view(-1), torch.nan)
        ctx.save_for_backward(logits, local, normalizer)
        ctx.columns, ctx.how = columns, how
        return (normalizer - sums[1]).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """d logits = grad * (softmax - one_hot(target)), in their dtype, and over them if `overwrite`."""
        logits, local, normalizer = ctx.saved_tensors
        rows = logits.reshape(-1, logits.shape[-1]).contiguous()
        grad = grad.reshape(-1).to(normalizer.dtype)
        out = rows if ctx.how.overwrite else torch.empty_like(rows)
        ctx.how.passes.gradient(rows, ctx.columns, local, normalizer, grad, out)
        if ctx.how.overwrite:
            # Whoever else saved the logits for backward gets autograd's error instead of the gradient.
            torch.autograd.graph.increment_version(logits)
        return out.view(logits.shape), None, None, None, None, None
