"""Row chunks: how many rows a hand-written operator handles at once, so its temporaries stay in cache.

A chain of elementwise passes over a tensor larger than the cache pays main memory for every pass;
over chunks that fit it pays once. On a GPU the launch of each pass costs more than the memory, so
chunks there are only large enough to bound the temporaries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CPU_ELEMENTS = 1 << 16  # per thread; 256 KiB of fp32, a few of which fit a second-level cache
ACCELERATOR_ELEMENTS = 1 << 26


def row_chunks(tensor: Tensor, rows: int, width: int) -> Iterator[slice]:
    """Slices that cover `rows` rows of `width` elements each, on `tensor`'s device."""
    on_cpu = tensor.device.type == "cpu"
    elements = CPU_ELEMENTS * torch.get_num_threads() if on_cpu else ACCELERATOR_ELEMENTS
    step = max(1, elements // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for reduced floats, the type itself for fp32 and fp64: where statistics are taken."""
    return torch.promote_types(dtype, torch.float32)
