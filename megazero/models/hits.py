"""The number of correct predictions over a vocabulary that is sliced over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.cross_entropy import VocabularySlice


def vocab_parallel_argmax(logits: Tensor, part: VocabularySlice) -> Tensor:
    """The id with the highest logit over all ranks, int64 [...], from logits [..., v/tp].

    Of equal logits the lowest id wins, on every layout. Columns beyond the vocabulary are padding.
    """
    if columns := part.held(logits.shape[-1]):
        value, best = logits[..., :columns].max(-1)
    else:
        value = logits.new_full(logits.shape[:-1], -torch.inf)
        best = torch.zeros_like(value, dtype=torch.int64)
    best = best + part.start
    if part.group.size == 1:
        return best
    highest = value.to(torch.float64, copy=True)
    part.group.all_reduce(highest, op="max")
    lowest = torch.where(value == highest, -best.double(), -torch.inf)
    part.group.all_reduce(lowest, op="max")
    return -lowest.long()


def vocab_parallel_hits(logits: Tensor, target: Tensor, part: VocabularySlice) -> Tensor:
    """How many targets, int64 [...], have the highest logit: a float32 scalar, equal on all ranks."""
    return (vocab_parallel_argmax(logits, part) == target).sum().float()
