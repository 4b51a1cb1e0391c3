"""The choice of tokens as its definition reads."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.counter_random import derive


def token_bits(length: int) -> int:
    """The number of lowest bits of a random number that the token's number replaces."""
    return max(1, (length - 1).bit_length())


def kept_columns_reference(keys: Tensor, length: int, kept: int) -> Tensor:
    """The tokens with the least random numbers, which end in the token so that no two are equal."""
    numbers = torch.arange(length, device=keys.device).unsqueeze(1)
    bits = derive(keys, numbers)  # [s, b]
    low = token_bits(length)
    order = (bits >> low << low) | numbers
    least = order.topk(kept, dim=0, largest=False, sorted=False).values
    return (least & ((1 << low) - 1)).sort(dim=0).values
