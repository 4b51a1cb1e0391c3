"""Dropout (Srivastava et al. 2014) whose mask is a function of keys and absolute positions.

A sequence-parallel shard's mask is the slice of the whole's, a tensor-parallel rank's heads are theirs
in the whole, and recompute replays the mask with nothing saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.ops.counter_random import derive, keep_mask


@dataclass(frozen=True)
class Dropout:
    """Drop a share `p`, with one key per sequence of the micro-batch.

    keys: int64 [b]; equal on every rank that holds a part of the sequence.
    offset: first sequence position that this shard holds.
    head_offset: first attention head that this rank holds.
    """

    p: float
    keys: Tensor
    offset: int = 0
    head_offset: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.p < 1.0:
            raise ValueError(f"`p` must be in [0, 1), but is {self.p}; give the share to drop.")


def hidden_row_keys(dropout: Dropout, s: int) -> Tensor:
    """int64 [s, b]: the key of each (position, sequence)."""
    positions = torch.arange(dropout.offset, dropout.offset + s, device=dropout.keys.device)
    return derive(dropout.keys, positions.unsqueeze(1))


def attention_row_keys(dropout: Dropout, heads: int, q: int) -> Tensor:
    """int64 [b, heads, q]: the key of each (sequence, head, query)."""
    device = dropout.keys.device
    head = torch.arange(dropout.head_offset, dropout.head_offset + heads, device=device)
    query = torch.arange(dropout.offset, dropout.offset + q, device=device)
    return derive(derive(dropout.keys.unsqueeze(1), head).unsqueeze(2), query)


def dropout_mask_hidden(dropout: Dropout, s: int, b: int, h: int) -> Tensor:
    """bool [s, b, h], True where kept: f(key of the sequence, absolute position, channel)."""
    _check_keys(dropout, b)
    keys = hidden_row_keys(dropout, s).unsqueeze(-1)
    return keep_mask(keys, dropout.p, torch.arange(h, device=keys.device))


def dropout_mask_attention(dropout: Dropout, b: int, heads: int, q: int, k: int) -> Tensor:
    """bool [b, heads, q, k], True where kept: f(key, head_offset + head, offset + query, key position)."""
    _check_keys(dropout, b)
    keys = attention_row_keys(dropout, heads, q).unsqueeze(-1)
    return keep_mask(keys, dropout.p, torch.arange(k, device=keys.device))


def _check_keys(dropout: Dropout, b: int) -> None:
    if dropout.keys.shape != (b,):
        raise ValueError(
            f"`keys` must hold one key per sequence ({b}), but has shape {tuple(dropout.keys.shape)}; "
            "give int64 [b]."
        )
