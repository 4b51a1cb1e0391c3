"""Layouts of block-sparse attention: which blocks of keys a block of queries attends to.

Each function is one of DeepSpeed's sparsity configurations (its `ops.sparse_attention`, until it removed it)
and gives the same blocks, a bool tensor [n or 1, N, N] for n heads and N blocks, rows for queries. With
`causal` these are its "unidirectional" layouts. A block is whole even where later keys lie in it, and a run
of global blocks is whole from the first of its rows on, so causality needs a mask of its own as well.

What DeepSpeed draws from a stream is a function of (key, head, row) here, so that every rank sees the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.ops.counter_random import derive

_NEVER = torch.iinfo(torch.int64).max


def dense(blocks: int) -> Tensor:
    """bool [1, N, N]: everything."""
    return torch.ones(1, blocks, blocks, dtype=torch.bool)


def fixed(
    blocks: int,
    *,
    heads: int = 1,
    local: int = 4,
    globals_: int = 1,
    patterns: int = 1,
    horizontal: bool = False,
    causal: bool = False,
) -> Tensor:
    """bool [n, N, N]: windows side by side, and a few blocks of each that all others see (Child et al. 2019).

    Args:
        blocks: N.
        heads: n; head h has the pattern h mod `patterns`.
        local: the number of blocks in a window.
        globals_: how many of a window's blocks all see: the last ones in the first pattern, those before them
            in the next. A short window at the end has them where a full one would, as far as it reaches.
        patterns: how many choices of these blocks there are.
        horizontal: whether the global blocks also see all.
        causal: whether blocks see earlier ones only.
    """
    place = torch.arange(blocks)
    window = place // local
    seen = (window.unsqueeze(1) == window).repeat(heads, 1, 1)
    if causal:
        seen.tril_()
    full = blocks - blocks % local
    for head in range(heads):
        first = local - (1 + head % patterns) * globals_
        starts = [begin + first for begin in range(0, full, local)]
        if full < blocks:
            starts.append(min(full + first, blocks - globals_))
        for start in starts:
            run = slice(start, start + globals_)
            seen[head, start if causal else 0 :, run] = True
            if horizontal:
                seen[head, run] = True
    return seen


def variable(
    blocks: int,
    *,
    heads: int = 1,
    random: int = 0,
    windows: Sequence[int] = (4,),
    starts: Sequence[int] = (0,),
    ends: Sequence[int] | None = None,
    horizontal: bool = False,
    causal: bool = False,
    key: int = 0,
) -> Tensor:
    """bool [n, N, N]: windows of several widths, global blocks by their numbers, random ones.

    Args:
        blocks: N.
        heads: n, which differ in their random blocks.
        random: how many random blocks each block sees; with `causal` they are its own or earlier ones.
        windows: the widths of the windows from the beginning on; the last one is repeated.
        starts, ends: the runs of global blocks; without `ends` each has one block.
        horizontal: whether the global blocks also see all.
        causal: whether blocks see earlier ones only.
        key: that of the random numbers.
    """
    window = torch.repeat_interleave(torch.tensor(_widths(blocks, windows)))
    seen = window.unsqueeze(1) == window
    if causal:
        seen.tril_()
    for run in _runs(starts, ends):
        seen[run.start if causal else 0 :, run] = True
        if horizontal:
            seen[run] = True
    return seen | random_blocks(blocks, heads, random, causal, key)


def bigbird(
    blocks: int,
    *,
    heads: int = 1,
    random: int = 1,
    window: int = 3,
    globals_: int = 1,
    causal: bool = False,
    key: int = 0,
) -> Tensor:
    """bool [n, N, N]: a window that slides, first blocks that see and are seen, and random ones
    (BigBird, Zaheer et al. 2020).

    Args:
        blocks: N.
        heads: n, which differ in their random blocks.
        random: how many random blocks each block sees; with `causal` they are its own or earlier ones.
        window: the width of the window, rounded up to an odd number.
        globals_: how many blocks at the beginning are global.
        causal: whether blocks see earlier ones only.
        key: that of the random numbers.
    """
    seen = _sliding(blocks, window)
    seen[:globals_], seen[:, :globals_] = True, True
    both = seen | random_blocks(blocks, heads, random, causal, key)
    return both.tril_() if causal else both


def bslongformer(
    blocks: int,
    *,
    window: int = 3,
    starts: Sequence[int] = (0,),
    ends: Sequence[int] | None = None,
    causal: bool = False,
) -> Tensor:
    """bool [1, N, N]: a window that slides, and global blocks by their numbers that see and are seen
    (Longformer, Beltagy et al. 2020, in blocks).

    Args:
        blocks: N.
        window: the width of the window, rounded up to an odd number.
        starts, ends: the runs of global blocks; without `ends` each has one block.
        causal: whether blocks see earlier ones only.
    """
    seen = _sliding(blocks, window)
    for run in _runs(starts, ends):
        seen[run], seen[:, run] = True, True
    return (seen.tril_() if causal else seen).unsqueeze(0)


def local_sliding_window(blocks: int, *, window: int = 3, causal: bool = True) -> Tensor:
    """bool [1, N, N]: a window that slides, its width rounded up to an odd number, and nothing else."""
    seen = _sliding(blocks, window)
    return (seen.tril_() if causal else seen).unsqueeze(0)


def random_blocks(blocks: int, heads: int, count: int, causal: bool, key: int) -> Tensor:
    """bool [n, N, N]: `count` different random blocks of each row, or all up to its own if these are fewer.

    With `causal` they are drawn from those up to the row's own. A row's choice is a function of
    (key, head, row).
    """
    chosen = torch.zeros(heads, blocks, blocks, dtype=torch.bool)
    if count == 0:
        return chosen
    place = torch.arange(blocks)
    rows = derive(derive(key, torch.arange(heads)).unsqueeze(1), place)  # [n, N]
    scores = derive(rows.unsqueeze(2), place)
    if causal:
        scores.masked_fill_(place > place.unsqueeze(1), _NEVER)
    chosen.scatter_(2, scores.topk(count, largest=False).indices, True)
    return chosen.tril_() if causal else chosen


def _sliding(blocks: int, window: int) -> Tensor:
    place = torch.arange(blocks)
    return (place - place.unsqueeze(1)).abs() <= window // 2


def _widths(blocks: int, windows: Sequence[int]) -> list[int]:
    """The widths of the windows that `blocks` blocks fill."""
    widths: list[int] = []
    while (left := blocks - sum(widths)) > 0:
        widths.append(min(left, windows[min(len(widths), len(windows) - 1)]))
    return widths


def _runs(starts: Sequence[int], ends: Sequence[int] | None) -> list[slice]:
    stops = [start + 1 for start in starts] if ends is None else ends
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
