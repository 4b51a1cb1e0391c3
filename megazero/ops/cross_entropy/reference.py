"""Vocab-parallel cross-entropy as its formula reads: log-softmax of the whole row, negated at the target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megazero.ops.autograd import Gradients, apply
from megazero.ops.chunks import compute_dtype
from megazero.ops.reduce_group import ReduceGroup


class _GatherVocabulary(torch.autograd.Function):
    """Every rank's slice placed in zeros of the full width and summed; backward takes the slice back."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: ReduceGroup, vocab_start: int) -> Tensor:
        width = logits.shape[-1]
        ctx.slice = slice(vocab_start, vocab_start + width)
        whole = logits.new_zeros(*logits.shape[:-1], width * group.size)
        whole[..., ctx.slice] = logits
        group.all_reduce(whole, op="sum")
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        return grad[..., ctx.slice].clone(), None, None


def gather_vocabulary(logits: Tensor, group: ReduceGroup, vocab_start: int) -> Tensor:
    """Logits [..., v] of the padded vocabulary from each rank's [..., v/tp]; differentiable."""
    return apply(_GatherVocabulary, logits, group, vocab_start)


def vocab_parallel_cross_entropy_reference(
    logits: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    overwrite: bool = False,
) -> Tensor:
    """-log softmax(all ranks' logits, padding left out)[target]; NaN for a target outside the vocabulary.

    It has no use for the permission to overwrite the logits.
    """
    whole = gather_vocabulary(logits.to(compute_dtype(logits.dtype)), group, vocab_start)
    foreign = (target < 0) | (target >= vocab_size)
    log_probs = torch.log_softmax(whole[..., :vocab_size], -1)
    picked = log_probs.gather(-1, target.masked_fill(foreign, 0).unsqueeze(-1)).squeeze(-1)
    return -picked * torch.ones_like(picked).masked_fill(foreign, torch.nan)
