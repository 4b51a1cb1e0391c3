"""The number of right answers, when the vocabulary is sliced over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.mpu.group import Group


def vocab_parallel_argmax(logits: Tensor, group: Group, vocab_start: int, vocab_size: int) -> Tensor:
    """The id with the highest logit, int64 [...], of this rank's logits [..., v/tp].

    Of equal logits the lowest id wins, on every layout. The arguments are as for
    `vocab_parallel_cross_entropy`; columns at or beyond `vocab_size` are padding.
    """
    columns = min(max(vocab_size - vocab_start, 0), logits.shape[-1])
    if columns:
        value, best = logits[..., :columns].max(-1)
    else:
        value = logits.new_full(logits.shape[:-1], -torch.inf)
        best = torch.zeros_like(value, dtype=torch.int64)
    best = best + vocab_start
    if group.size == 1:
        return best
    highest = value.to(torch.float64, copy=True)
    group.all_reduce(highest, op="max").wait()
    lowest = torch.where(value == highest, -best.double(), -torch.inf)
    group.all_reduce(lowest, op="max").wait()
    return -lowest.long()


def vocab_parallel_hits(
    logits: Tensor, target: Tensor, group: Group, vocab_start: int, vocab_size: int
) -> Tensor:
    """The number of targets, int64 [...], with the highest logit: a float32 scalar, equal on all ranks."""
    return (vocab_parallel_argmax(logits, group, vocab_start, vocab_size) == target).sum().float()
