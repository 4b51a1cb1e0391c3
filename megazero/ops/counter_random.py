"""Counter-based randomness: a random number is a function of (key, index), never of a stream's state.

So any rank can produce its slice of a logically whole tensor, recompute replays without saved state, and
every layout sees the same numbers. First comes SplitMix64 on Python integers and on int64 tensors, where
products wrap and shifts are made logical; then the initial weights, and the cheaper 32-bit generator of
dropout masks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MASK_64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_KEEP_MULTIPLIER = 0x7FEB352D


def mix_64(z: int) -> int:
    """SplitMix64's output function (Steele, Lea & Flood 2014, "Fast splittable PRNGs"), a bijection."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def signed_64(value: int) -> int:
    """The int64 with the low 64 bits of `value`, since tensors have no unsigned arithmetic."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


GOLDEN_GAMMA = signed_64(_GAMMA)
_FIRST_FACTOR = signed_64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = signed_64(0x94D049BB133111EB)


def _xor_shift_(z: Tensor, bits: int) -> Tensor:
    """z ^= z >> bits, logically: the arithmetic shift's copies of the sign are masked off."""
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def mix_64_(z: Tensor) -> Tensor:
    """SplitMix64's output function, in place on an int64 tensor."""
    _xor_shift_(z, 30).mul_(_FIRST_FACTOR)
    _xor_shift_(z, 27).mul_(_SECOND_FACTOR)
    return _xor_shift_(z, 31)


def derive(key: int | Tensor, index: Tensor) -> Tensor:
    """int64 random bits as a function of (key, index), broadcast: also how to derive keys from keys.

    `key` is an int or an int64 tensor, `index` an int64 tensor. Neighbouring keys share nothing.
    """
    # An int is mixed here: as a tensor it would have to be copied to the device.
    start = signed_64(mix_64(key & MASK_64)) if isinstance(key, int) else mix_64_(key.clone())
    return mix_64_((index + 1) * GOLDEN_GAMMA + start)


def hash_uniform(key: int | Tensor, index: Tensor) -> Tensor:
    """float32 uniform in [0, 1), a function of (key, index) alone; multiples of 2^-24."""
    bits = (derive(key, index) >> 40).bitwise_and_((1 << 24) - 1)
    return bits.to(torch.float32).mul_(2.0**-24)


def _normal_at(key: int, index: Tensor) -> Tensor:
    """Standard normal float64 at flat `index`, by inverting the distribution function.

    52 random bits and a half give an odd numerator over 2^53, which float64 holds exactly: symmetric
    about zero and never at +-1, where the inverse is infinite.
    """
    bits = (derive(key, index) >> 12).bitwise_and_((1 << 52) - 1)
    symmetric = bits.to(torch.float64).add_(0.5).mul_(2.0**-51).sub_(1.0)
    return symmetric.erfinv_().mul_(math.sqrt(2))


def drawn_at_once(device: torch.device) -> int:
    """The number of elements that `normal_block` computes at once, with six temporaries of 8 bytes each.

    On a CPU they stay in cache; on a GPU each launch has enough work. The size does not change the numbers.
    """
    return 1 << 24 if device.type == "cuda" else 1 << 17


def _flat_index(
    rows: Tensor, full_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Flat index in the whole of the first element of each of the block's rows (all dims but the last)."""
    flat = torch.full_like(rows, offset[-1])
    stride = full_shape[-1]
    for dim in range(len(shape) - 2, -1, -1):
        flat += (rows % shape[dim] + offset[dim]) * stride
        rows = rows // shape[dim]
        stride *= full_shape[dim]
    return flat


def _check_block(full_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> None:
    if not len(full_shape) == len(offset) == len(shape):
        raise ValueError(
            f"`offset` and `shape` must have as many dims as `full_shape` ({len(full_shape)}), "
            f"but have {len(offset)} and {len(shape)}; give one number per dim."
        )
    for dim, (full, start, size) in enumerate(zip(full_shape, offset, shape, strict=True)):
        if start < 0 or size < 0 or start + size > full:
            raise ValueError(
                f"`offset` + `shape` must lie within `full_shape` ({full}) in dim {dim}, "
                f"but is {start} + {size}; ask for a block of the whole tensor."
            )


def normal_block(
    key: int,
    full_shape: Sequence[int],
    offset: Sequence[int],
    shape: Sequence[int],
    std: float,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The block [offset, offset + shape) of a normal(0, std^2) tensor of `full_shape`, that alone.

    Equals `normal(key, full_shape, std)` sliced, without making the rest. Computed in float64, so
    devices agree except where their `erfinv` differs in float64's last bits across a rounding border.
    On the meta device it returns an empty tensor. Raises ValueError for a block outside the whole.
    """
    _check_block(full_shape, offset, shape)
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    if out.device.type == "meta" or out.numel() == 0:
        return out
    if not shape:
        return out.copy_(_normal_at(key, torch.zeros((), dtype=torch.int64, device=device)) * std)
    width = shape[-1]
    rows_out = out.view(-1, width)
    columns = torch.arange(width, device=out.device)
    piece = drawn_at_once(out.device)
    row_step, column_step = max(1, piece // width), min(width, piece)
    for start in range(0, rows_out.shape[0], row_step):
        stop = min(start + row_step, rows_out.shape[0])
        base = _flat_index(torch.arange(start, stop, device=out.device), full_shape, offset, shape)
        for left in range(0, width, column_step):
            index = base.unsqueeze(1) + columns[left : left + column_step]
            rows_out[start:stop, left : left + column_step] = _normal_at(key, index).mul_(std)
    return out


def normal(
    key: int,
    shape: Sequence[int],
    std: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A whole normal(0, std^2) tensor: `normal_block` at offset zero."""
    return normal_block(key, shape, (0,) * len(shape), shape, std, dtype, device)


def _check_probability(p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"`p` must be in [0, 1), but is {p}; give the share to drop.")


@dataclass(frozen=True)
class KeepRows:
    """The rows' share of dropout's hash, int32 in the keys' shape; slices of rows are slices of these.

    The hash has 32 bits per element. Its row's key and its column's index are mixed once each by SplitMix64,
    on their own small shapes. An element then costs two 32-bit products, (low(row) + column) * (high(row) |
    1) and one after a shift, about a quarter of SplitMix64. For its measured quality see
    tests/ops/test_counter_random.py.
    """

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
    x.bitwise_xor_(x >> 16).mul_(_KEEP_MULTIPLIER)
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
