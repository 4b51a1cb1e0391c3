"""Rotary position embedding as its formula reads (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channels i and i + dim/2 are rotated by angle i; channels from dim on pass through."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)
