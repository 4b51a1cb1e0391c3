"""The embedding as its formula reads."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding_reference(tokens: Tensor, weight: Tensor, first: int, vocab_size: int) -> Tensor:
    """out[i] = table[tokens[i]], where all rows of the table but first .. first + len(weight) are zeros."""
    table = weight.new_zeros(max(vocab_size, first + len(weight)), weight.shape[1])
    table = torch.cat([table[:first], weight, table[first + len(weight) :]])[:vocab_size]
    return table[tokens]
