"""Dropout's randomness: 32 bits per element from a hash of its row's key and its column's index.

The row and the column are mixed once each by SplitMix64, on their own small shapes. An element then
costs two 32-bit products, (low(row) + column) * (high(row) | 1) and one after a shift, about a quarter
of SplitMix64. Measured quality: see tests/ops/test_counter_random.py.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from megazero.ops.counter_random.splitmix import GOLDEN_GAMMA, mix_64_

_MULTIPLIER = 0x7FEB352D


def _check_probability(p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"`p` must be in [0, 1), but is {p}; give the share to drop.")


def _kept(keys: Tensor, p: float, index: Tensor) -> Tensor:
    """int32 1 where kept, else 0, of the broadcast shape of `keys` and `index`."""
    row = mix_64_(keys + GOLDEN_GAMMA)
    column = mix_64_((index + 1) * GOLDEN_GAMMA).to(torch.int32)
    low, high = row.to(torch.int32), (row >> 32).to(torch.int32)
    x = (low + column).mul_(high.bitwise_or_(1))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_MULTIPLIER)
    threshold = min(round(p * (1 << 32)) - (1 << 31), (1 << 31) - 1)
    # In place: torch vectorizes int32 comparisons into int32, and into bool does not.
    return x.ge_(threshold)


def keep_mask(keys: Tensor, p: float, index: Tensor) -> Tensor:
    """bool, True with probability 1 - p (to 2^-32), a function of (key, index) alone.

    `keys` and `index` are int64 and broadcast; cheapest where each varies along its own dims, such
    as keys [..., rows, 1] and index [columns]. Raises ValueError unless 0 <= p < 1.
    """
    _check_probability(p)
    return _kept(keys, p, index).to(torch.bool)


def keep_multiplier(keys: Tensor, p: float, index: Tensor, value: float) -> Tensor:
    """float32 `value` where `keep_mask` is True, else 0: the mask ready to be multiplied by.

    Built from bits: 1 times the bit pattern of `value` read as fp32, with no select and no convert.
    """
    _check_probability(p)
    (pattern,) = struct.unpack("<i", struct.pack("<f", value))
    return _kept(keys, p, index).mul_(pattern).view(torch.float32)
