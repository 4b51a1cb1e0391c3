"""Boxes: axis-aligned parts of a tensor, by which checkpoints say where elements are.

ZeRO cuts a parameter's flattened slice, so a rank owns a range of elements. In memory order such a range is a
few boxes: the rest of a row, whole rows, the beginning of a row. Boxes, given in coordinates of the whole
tensor, mean the same on every layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PRIME = (1 << 61) - 1


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: its offset and its size along each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """All of a tensor of this shape."""
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def fingerprint(self) -> int:
        """A hash that is additive modulo `PRIME`: boxes that cover a tensor once sum to the whole's.

        Each element is a term of a polynomial, evaluated at a fixed point (times a factor that depends on the
        number of dims alone). Boxes that do not cover the tensor once have the same sum with a probability of
        at most 2^-40 (Schwartz 1980).
        """
        total = 1
        for dim, (start, size) in enumerate(zip(self.offset, self.shape, strict=True)):
            point = pow(5, pow(3, 101 * (dim + 1), PRIME), PRIME)  # no small power of another dim's point
            total = total * pow(point, start, PRIME) * (pow(point, size, PRIME) - 1) % PRIME
        return total

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of this box in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def within(self, other: Box) -> tuple[slice, ...]:
        """The index of this box in a tensor that holds `other`."""
        return tuple(
            slice(o - p, o - p + n) for o, p, n in zip(self.offset, other.offset, self.shape, strict=True)
        )

    def shifted(self, by: Iterable[int]) -> Box:
        """The box moved by an offset along each dim."""
        return Box(tuple(o + d for o, d in zip(self.offset, by, strict=True)), self.shape)

    def overlap(self, other: Box) -> Box | None:
        """The intersection, or None."""
        starts, shape = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start = max(a, b)
            size = min(a + n, b + m) - start
            if size <= 0:
                return None
            starts.append(start)
            shape.append(size)
        return Box(tuple(starts), tuple(shape))

    def __str__(self) -> str:
        return "[" + ",".join(f"{s.start}:{s.stop}" for s in self.slices) + "]"


def boxes_of_span(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes with elements `start` to `stop` of a flattened tensor, in memory order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_span(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.shape))


def gaps_or_overlaps(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Say why the boxes do not cover a tensor exactly once; None if they do."""
    whole = Box.whole(shape)
    filled = sorted(box for box in boxes if box.numel)
    for box in filled:
        if not len(box.offset) == len(box.shape) == len(shape) or box.overlap(whole) != box:
            return f"{list(box.shape)} at {list(box.offset)} is not within the shape {list(shape)}"
    for a, b in _colliding(filled):
        return f"{a} and {b} overlap"
    covered = sum(box.numel for box in filled)
    if covered != whole.numel:
        return f"{covered} of {whole.numel} elements are there"
    return None


def _colliding(boxes: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs of boxes that overlap, by a sweep along the first dim; `boxes` are sorted by offset."""
    active: list[Box] = []
    for box in boxes:
        if not box.shape:
            yield from ((other, box) for other in active)
        else:
            active = [other for other in active if other.offset[0] + other.shape[0] > box.offset[0]]
            yield from ((other, box) for other in active if other.overlap(box))
        active.append(box)
