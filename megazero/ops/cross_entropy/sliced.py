"""Vocab-parallel cross-entropy around two passes over a rank's logits, one forward and one backward.

Forward keeps a running maximum per slice instead of agreeing on it first (the online softmax of
Milakov & Gimelshein 2018), so the ranks reduce three numbers per token and the logits are read once.
Saved: the logits themselves and one number per token. Padding columns are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class SlicePasses:
    """How one rank reads its slice of the logits, [rows, width] of which the first `columns` count.

    local: int64 [rows], the target's column here, or -1 where another rank holds it.
    statistics(logits, columns, local): each row's maximum (at least the lowest number of its type), its
        sum of exp(logit - maximum), and the target's logit or 0; in the dtype of the loss.
    gradient(logits, columns, local, normalizer, grad): grad * (exp(logit - normalizer) - one_hot(local))
        in the logits' dtype, 0 in the padding; normalizer and grad [rows] in the dtype of the loss.
    """

    statistics: Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[[Tensor, int, Tensor, Tensor, Tensor], Tensor]


class SlicedCrossEntropy(torch.autograd.Function):
    """Loss of each token of logits [..., v/tp], and back."""

    @staticmethod
    def forward(
        ctx, logits: Tensor, target: Tensor, group, vocab_start: int, vocab_size: int, passes: SlicePasses
    ):
        """The loss, shaped as target; see `vocab_parallel_cross_entropy`."""
        padded = logits.shape[-1]
        columns = min(max(vocab_size - vocab_start, 0), padded)
        rows = logits.reshape(-1, padded)
        held = (target >= vocab_start) & (target < vocab_start + columns)
        local = torch.where(held, target - vocab_start, -1).view(-1)
        maximum, total, picked = passes.statistics(rows, columns, local)
        slice_maximum = maximum.clone()
        group.all_reduce(maximum, op="max")
        sums = torch.stack((total * torch.exp(slice_maximum - maximum), picked))
        group.all_reduce(sums, op="sum")
        normalizer = sums[0].log_().add_(maximum)
        normalizer.masked_fill_(((target < 0) | (target >= vocab_size)).view(-1), torch.nan)
        ctx.save_for_backward(rows, local, normalizer)
        ctx.columns, ctx.shape, ctx.passes = columns, logits.shape, passes
        return (normalizer - sums[1]).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """d logits = grad * (softmax - one_hot(target)), written in the logits' own dtype."""
        rows, local, normalizer = ctx.saved_tensors
        grad = grad.reshape(-1).to(normalizer.dtype)
        grad_rows = ctx.passes.gradient(rows, ctx.columns, local, normalizer, grad)
        return grad_rows.view(ctx.shape), None, None, None, None, None
