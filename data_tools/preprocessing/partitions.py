"""Divides the inputs among partitions: contiguous parts of about equal size that, one after another, are all
of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from data_tools.preprocessing.chunks import Segment, is_gzip, skip_line

_BLOCK = 1 << 20


def divide(paths: Sequence[str], parts: int) -> list[list[Segment]]:
    """The stretches of each part. A plain file is cut after a newline, a compressed one not at all; a part
    may be left without any."""
    sizes = [os.path.getsize(path) for path in paths]
    total = max(sum(sizes), 1)
    shares: list[list[Segment]] = [[] for _ in range(parts)]
    before = 0
    for path, size in zip(paths, sizes, strict=True):
        part, start = min(before * parts // total, parts - 1), 0
        if is_gzip(path):
            shares[part].append(Segment(path))
            start = size
        while start < size:
            end = _line_end(path, max(start, total * (part + 1) // parts - before), size)
            if end > start:
                shares[part].append(Segment(path, start, end))
            part, start = part + 1, end
        before += size
    return shares


def _line_end(path: str, at: int, size: int) -> int:
    """The end of the line that the byte before `at` belongs to."""
    if at == 0 or at >= size:
        return min(at, size)
    with open(path, "rb") as file:
        file.seek(at - 1)
        skip_line(file)
        return file.tell()


def lines_before(stretch: Segment) -> int:
    """The number of lines of its file that come before a segment."""
    count, left = 0, stretch.start
    with open(stretch.path, "rb") as file:
        while left and (block := file.read(min(left, _BLOCK))):
            count += block.count(b"\n")
            left -= len(block)
    return count
