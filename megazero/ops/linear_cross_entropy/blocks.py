"""Projection and cross-entropy, block by block of a rank's vocabulary.

A block of the vocabulary is what another rank's slice is: it adds a maximum, a sum of exponentials and, if
it holds the target, a logit for each token (the online softmax of Milakov & Gimelshein 2018). Backward makes
each block of logits again and writes its gradient over it, as Cut Cross-Entropy does (Wijmans et al. 2025).
Blocks are of the vocabulary rather than of tokens, so that a row of the weight gets its gradient from one
product, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.autograd import Gradients
from megazero.ops.chunks import compute_dtype
from megazero.ops.cross_entropy.sliced import SlicePasses
from megazero.ops.reduce_group import ReduceGroup


@dataclass(frozen=True)
class VocabularySlice:
    """A rank's slice of the vocabulary, and the way in which its logits are computed.

    group: the ranks that hold the other slices. start: the first id here. size: the number of ids of the
    whole vocabulary. block: the number of columns to project to at once. passes: the passes over logits.
    """

    group: ReduceGroup
    start: int
    size: int
    block: int
    passes: SlicePasses

    def held(self, padded: int) -> int:
        """The number of the `padded` columns that are no padding."""
        return min(max(self.size - self.start, 0), padded)

    def blocks(self, padded: int) -> Iterator[tuple[slice, int]]:
        """The blocks that are not padding alone, each with the number of its columns that are no padding."""
        held = self.held(padded)
        for first in range(0, held, self.block):
            columns = slice(first, min(first + self.block, padded))
            yield columns, min(columns.stop, held) - first


def _within(local: Tensor, columns: slice) -> Tensor:
    """The targets' numbers within the block, or -1."""
    here = (local >= columns.start) & (local < columns.stop)
    return torch.where(here, local - columns.start, -1)


class BlockwiseLoss(torch.autograd.Function):
    """Loss of each token of x [..., h] by weight [v/tp, h], and back; saves both and one number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, part: VocabularySlice) -> Tensor:
        """The loss, shaped as target; see `linear_cross_entropy`."""
        rows, padded = x.reshape(-1, x.shape[-1]), weight.shape[0]
        held = (target >= part.start) & (target < part.start + part.held(padded))
        local = torch.where(held, target - part.start, -1).view(-1)
        wide = compute_dtype(x.dtype)
        maximum = torch.full((len(rows),), torch.finfo(wide).min, dtype=wide, device=x.device)
        total, picked = torch.zeros_like(maximum), torch.zeros_like(maximum)
        for columns, counted in part.blocks(padded):
            logits = F.linear(rows, weight[columns])
            highest, summed, logit = part.passes.statistics(logits, counted, _within(local, columns))
            before, maximum = maximum, torch.maximum(maximum, highest)
            total = total * torch.exp(before - maximum) + summed * torch.exp(highest - maximum)
            picked += logit
        of_slice = maximum.clone()
        part.group.all_reduce(maximum, op="max")
        sums = torch.stack((total * torch.exp(of_slice - maximum), picked))
        part.group.all_reduce(sums, op="sum")
        normalizer = sums[0].log_().add_(maximum)
        normalizer.masked_fill_(((target < 0) | (target >= part.size)).view(-1), torch.nan)
        ctx.save_for_backward(x, weight, local, normalizer)
        ctx.part = part
        return (normalizer - sums[1]).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """The gradients of x, this slice's part of the sum, and of the weight."""
        x, weight, local, normalizer = ctx.saved_tensors
        rows, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1).to(normalizer.dtype)
        grad_rows = torch.zeros_like(rows, dtype=normalizer.dtype)
        grad_weight = torch.zeros_like(weight)
        for columns, counted in ctx.part.blocks(weight.shape[0]):
            logits = F.linear(rows, weight[columns])
            ctx.part.passes.gradient(logits, counted, _within(local, columns), normalizer, grad, logits)
            grad_rows += logits @ weight[columns]
            grad_weight[columns] = logits.t() @ rows
        return grad_rows.to(x.dtype).view(x.shape), grad_weight, None, None
