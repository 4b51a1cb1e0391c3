"""Projection and cross-entropy as their formulas read, with all logits at once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megazero.ops.cross_entropy.reference import vocab_parallel_cross_entropy_reference
from megazero.ops.reduce_group import ReduceGroup


def linear_cross_entropy_reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    block: int,
) -> Tensor:
    """Cross-entropy of x [..., h] @ weight [v/tp, h]^T."""
    return vocab_parallel_cross_entropy_reference(F.linear(x, weight), target, group, vocab_start, vocab_size)
