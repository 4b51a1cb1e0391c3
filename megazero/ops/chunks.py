"""Row chunks: how many rows an operator handles at once, so that its temporaries stay in cache.

A chain of elementwise passes over a tensor larger than the cache goes to main memory in every pass; over
chunks that fit the cache it goes there once. On a GPU launching a pass costs more than the memory traffic,
so chunks there are as large as the bound on temporaries allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CPU_ELEMENTS = 1 << 16  # per thread; 256 KiB of fp32, and a second-level cache holds a few of them
ACCELERATOR_ELEMENTS = 1 << 26


def row_chunks(tensor: Tensor, rows: int, width: int) -> Iterator[slice]:
    """Slices that cover `rows` rows of `width` elements each, on `tensor`'s device."""
    on_cpu = tensor.device.type == "cpu"
    elements = CPU_ELEMENTS * torch.get_num_threads() if on_cpu else ACCELERATOR_ELEMENTS
    step = max(1, elements // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


_UPDATE_ELEMENTS = 1 << 24  # enough to fill a GPU; a temporary has 64 MiB


def side_by_side(first: Tensor, *others: Tensor | None) -> Iterator[Any]:
    """Chunks of contiguous tensors of one shape, flat, for an optimizer's pass; None stays None."""
    on_cpu = first.device.type == "cpu"
    size = CPU_ELEMENTS * torch.get_num_threads() if on_cpu else _UPDATE_ELEMENTS
    for start in range(0, first.numel(), size):
        part = slice(start, start + size)
        yield tuple(None if tensor is None else tensor.view(-1)[part] for tensor in (first, *others))


def scaled(grad: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """A gradient widened to `dtype` and multiplied by `scale`: a new tensor if there is anything to do."""
    wide = grad.to(dtype)
    return wide if scale == 1.0 else wide * scale


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics are taken: fp32 for reduced floats, the type itself for fp32 and fp64."""
    return dtype if dtype == torch.float64 else torch.float32
