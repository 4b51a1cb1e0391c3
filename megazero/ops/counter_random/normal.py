"""Normal numbers by counter: an element depends on (key, its flat index in the whole tensor) alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.ops.counter_random.splitmix import derive

_CHUNK = 1 << 17  # elements; about six int64 or float64 temporaries of 1 MiB, which stay in cache


def _normal_at(key: int, index: Tensor) -> Tensor:
    """Standard normal float64 at flat `index`, by inverting the distribution function.

    52 random bits and a half give an odd numerator over 2^53, which float64 holds exactly: symmetric
    about zero and never at +-1, where the inverse is infinite.
    """
    bits = (derive(key, index) >> 12).bitwise_and_((1 << 52) - 1)
    symmetric = bits.to(torch.float64).add_(0.5).mul_(2.0**-51).sub_(1.0)
    return symmetric.erfinv_().mul_(math.sqrt(2))


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
    row_step, column_step = max(1, _CHUNK // width), min(width, _CHUNK)
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
