"""Vocab-parallel KL divergence as its formula reads."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import compute_dtype
from megazero.ops.cross_entropy.reference import gather_vocabulary
from megazero.ops.reduce_group import ReduceGroup


def vocab_parallel_kl_divergence_reference(
    student: Tensor,
    teacher: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    temperature: float,
) -> Tensor:
    """Sum over the vocabulary of p_teacher (log p_teacher - log p_student)."""
    wide = compute_dtype(student.dtype)
    mine, its = (
        torch.log_softmax(
            gather_vocabulary(x.to(wide), group, vocab_start)[..., :vocab_size] / temperature, -1
        )
        for x in (student, teacher.detach())
    )
    return (its.exp() * (its - mine)).sum(-1)
