"""Dropout (Srivastava et al. 2014) whose mask is a function of keys and absolute positions.

Rows keep their masks wherever they are computed: a sequence-parallel shard's mask is the slice of the
whole's, tokens that are kept while others are dropped (random-LTD) have those that they have among all, the
heads of a tensor-parallel rank are theirs in the whole, and recompute replays the mask with nothing saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megazero.ops.counter_random import MASK_64, derive, keep_mask, keep_threshold, mix_64, signed_64
from megazero.ops.positions import Positions, check_positions, position_tensor

Launched = tuple[Tensor | None, Tensor | None, tuple[int, ...], int, float]
"""Keys, positions, numbers about both, the threshold and the factor, as kernels for GPUs take them."""


@dataclass(frozen=True)
class Dropout:
    """The dropout of a share `p` of hidden states [s, b, h].

    keys: int64 [b], one per sequence, or [s, b] where sequences share a column of rows (packing); equal on
        every rank that holds a part of the sequence.
    positions: the rows' positions in their sequences.
    site: the constant of a place in the model that `keys` are still to be mixed with; None: they are its own.
    """

    p: float
    keys: Tensor
    positions: Positions
    site: int | None = None

    def __post_init__(self) -> None:
        _check_share(self.p)

    @cached_property  # both passes ask
    def launched(self) -> Launched:
        """The dropout as kernels for GPUs take it."""
        keys, positions, site = self.keys, self.positions, self.site
        by_row, first, step, given = 0, 0, 0, None
        if isinstance(positions, range):
            first, step = positions.start, positions.step
        else:
            by_row, given = int(positions.dim() == 2), positions.contiguous()
        mixed = (0, 0) if site is None else (1, signed_64(mix_64(site & MASK_64)))
        numbers = (keys.shape[-1], int(keys.dim() == 2), by_row, first, step, *mixed)
        return keys.contiguous(), given, numbers, keep_threshold(self.p), 1 / (1 - self.p)

    @property
    def own_keys(self) -> Tensor:
        """The keys of the place itself, in the shape of `keys`."""
        return self.keys if self.site is None else derive(self.site, self.keys)

    def check(self, s: int, b: int) -> None:
        """Raise ValueError unless this describes `b` sequences of `s` rows."""
        _check_keys(self.keys, s, b)
        check_positions(self.positions, s, b, "positions")


@dataclass(frozen=True)
class AttentionDropout:
    """The dropout of a share `p` of attention probabilities [b, n, q, k].

    keys: int64 [b], one per sequence, or [q, b], one per query, where sequences share a column of rows; equal
        on every rank that holds a part of the sequence.
    query_positions, key_positions: the positions of queries and keys in their sequences.
    head_offset: the first attention head that this rank holds.
    """

    p: float
    keys: Tensor
    query_positions: Positions
    key_positions: Positions
    head_offset: int = 0

    def __post_init__(self) -> None:
        _check_share(self.p)

    def check(self, b: int, q: int, k: int) -> None:
        """Raise ValueError unless this describes `b` sequences, `q` queries and `k` keys."""
        _check_keys(self.keys, q, b)
        check_positions(self.query_positions, q, b, "query_positions")
        check_positions(self.key_positions, k, b, "key_positions")


def hidden_row_keys(dropout: Dropout) -> Tensor:
    """int64 [s, b]: the key of each (position, sequence)."""
    positions = position_tensor(dropout.positions, dropout.keys.device)
    columns = positions if positions.dim() == 2 else positions.unsqueeze(1)
    return derive(dropout.own_keys, columns).contiguous()


def attention_row_keys(dropout: AttentionDropout, heads: int) -> Tensor:
    """int64 [b, heads, q]: the key of each (sequence, head, query)."""
    device = dropout.keys.device
    head = torch.arange(dropout.head_offset, dropout.head_offset + heads, device=device)
    query = position_tensor(dropout.query_positions, device)
    if query.dim() == 2:
        query = query.t().unsqueeze(1)  # [b, 1, q]
    keys = dropout.keys.t() if dropout.keys.dim() == 2 else dropout.keys.unsqueeze(1)  # [b, q or 1]
    return derive(derive(keys.unsqueeze(1), head.unsqueeze(1)), query).contiguous()


def attention_columns(dropout: AttentionDropout) -> Tensor:
    """int64 [1 or b, k]: the position of each key."""
    positions = position_tensor(dropout.key_positions, dropout.keys.device)
    return positions.t() if positions.dim() == 2 else positions.unsqueeze(0)


def dropout_mask_hidden(dropout: Dropout, s: int, b: int, h: int) -> Tensor:
    """bool [s, b, h], True where kept: f(key of the sequence, position of the row, channel)."""
    dropout.check(s, b)
    keys = hidden_row_keys(dropout).unsqueeze(-1)
    return keep_mask(keys, dropout.p, torch.arange(h, device=keys.device))


def dropout_mask_attention(dropout: AttentionDropout, b: int, heads: int, q: int, k: int) -> Tensor:
    """bool [b, heads, q, k], True where kept: f(key of the sequence, head, position of query and of key)."""
    dropout.check(b, q, k)
    keys = attention_row_keys(dropout, heads).unsqueeze(-1)
    return keep_mask(keys, dropout.p, attention_columns(dropout)[:, None, None])


def _check_share(p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"`p` must be in [0, 1), but is {p}; give the share to drop.")


def _check_keys(keys: Tensor, rows: int, b: int) -> None:
    if keys.shape not in ((b,), (rows, b)):
        raise ValueError(
            f"`keys` must hold one key per sequence ({b}) or per row ({rows}, {b}), but has shape "
            f"{tuple(keys.shape)}; give int64 [b] or [s, b]."
        )
