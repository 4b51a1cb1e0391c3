"""Dropout's randomness: 32 bits per element from a hash of its row's key and its column's index.

The row and the column are mixed once each by SplitMix64, on their own small shapes. An element then
costs two 32-bit products, (low(row) + column) * (high(row) | 1) and one after a shift, about a quarter
of SplitMix64. Measured quality: see tests/ops/test_counter_random.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.ops.counter_random.splitmix import GOLDEN_GAMMA, mix_64_

_MULTIPLIER = 0x7FEB352D


def _check_probability(p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"`p` must be in [0, 1), but is {p}; give the share to drop.")


@dataclass(frozen=True)
class KeepRows:
    """The rows' share of the hash, int32 in the keys' shape; slices of rows are slices of these."""

    low: Tensor
    odd_high: Tensor

    @classmethod
    def of(cls, keys: Tensor) -> KeepRows:
        row = mix_64_(keys + GOLDEN_GAMMA)
        return cls(row.to(torch.int32), (row >> 32).to(torch.int32).bitwise_or_(1))

    def __getitem__(self, rows: slice | tuple[slice, ...]) -> KeepRows:
        return KeepRows(self.low[rows], self.odd_high[rows])


def keep_columns(index: Tensor) -> Tensor:
    """The columns' share of the hash, int32 in the shape of the int64 `index`."""
    return mix_64_((index + 1) * GOLDEN_GAMMA).to(torch.int32)


def keep_threshold(p: float) -> int:
    """The least int32 hash of an element that is kept, for kernels that make the hash themselves.

    Raises ValueError unless 0 <= p < 1.
    """
    _check_probability(p)
    return min(round(p * (1 << 32)) - (1 << 31), (1 << 31) - 1)


def _kept(rows: KeepRows, columns: Tensor, p: float) -> Tensor:
    """int32 1 where kept, else 0, of the broadcast shape."""
    x = (rows.low + columns).mul_(rows.odd_high)
    # The arithmetic shift costs one of 32 bits, the top one; the product spreads the rest over all.
    x.bitwise_xor_(x >> 16).mul_(_MULTIPLIER)
    # In place: torch vectorizes int32 comparisons into int32, and into bool does not.
    return x.ge_(keep_threshold(p))


def keep_mask(keys: Tensor, p: float, index: Tensor) -> Tensor:
    """bool, True with probability 1 - p (to 2^-32), a function of (key, index) alone.

    `keys` and `index` are int64 and broadcast; cheapest where each varies along its own dims, such
    as keys [..., rows, 1] and index [columns]. Raises ValueError unless 0 <= p < 1.
    """
    _check_probability(p)
    return _kept(KeepRows.of(keys), keep_columns(index), p).to(torch.bool)


def keep_multiplier(rows: KeepRows, columns: Tensor, p: float, value: float) -> Tensor:
    """float32 `value` where `keep_mask` is True, else 0: the mask ready to be multiplied by.

    `rows` and `columns` are the two shares of the hash, made once for many blocks. Built from bits,
    1 times the bit pattern of `value` read as fp32, with no select and no convert.
    """
    _check_probability(p)
    (pattern,) = struct.unpack("<i", struct.pack("<f", value))
    return _kept(rows, columns, p).mul_(pattern).view(torch.float32)
