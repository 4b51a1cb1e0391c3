"""Packing of sequences of different lengths into few rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """The row and column of a sequence's first token."""

    row: int
    column: int


def pack(lengths: Sequence[int], capacity: int) -> list[Slot]:
    """Pack sequences into rows of `capacity` tokens by first-fit decreasing; return the slot of each.

    It uses at most 11/9 of the fewest possible rows, plus one (Johnson 1973).
    """
    assert all(0 < length <= capacity for length in lengths), f"{lengths} must fit into {capacity}"
    fill: list[int] = []
    slots: dict[int, Slot] = {}
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, used in enumerate(fill) if used + lengths[number] <= capacity), len(fill))
        if row == len(fill):
            fill.append(0)
        slots[number] = Slot(row, fill[row])
        fill[row] += lengths[number]
    return [slots[number] for number in range(len(lengths))]
