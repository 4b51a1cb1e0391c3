"""Return a forked worker's results in memory that its parent shares, so that no array goes through a pipe."""

from __future__ import annotations

import mmap
import pickle
from dataclasses import dataclass
from typing import Any

_ALIGNMENT = 64


@dataclass(frozen=True)
class Parcel:
    """A pickled value: its arrays are in a slot at `spans`, (start, end) in bytes; `header` has the rest."""

    slot: int
    header: bytes
    spans: tuple[tuple[int, int], ...]


class SharedSlots:
    """`count` buffers of `capacity` bytes, filled in turn by one process and read by another.

    They are made before the fork; only pages that are written take memory. Nothing is locked: the reader must
    be done with a value before the writer packs the `count`-th value after it. Arrays are out-of-band buffers
    of pickle's protocol 5 (PEP 574), which are copied once, by the writer.
    """

    def __init__(self, count: int, capacity: int):
        self._memory = [memoryview(mmap.mmap(-1, capacity)) for _ in range(count)]
        self._capacity = capacity
        self._packed = 0

    def pack(self, value: object) -> object:
        """Pack a value for `unpack` in the other process; returns the value itself if it is too large."""
        buffers: list[pickle.PickleBuffer] = []
        header = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        slot = self._packed % len(self._memory)
        self._packed += 1
        views = [buffer.raw() for buffer in buffers]
        spans, end = [], 0
        for view in views:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + view.nbytes
            spans.append((start, end))
        if end > self._capacity:
            return value
        for view, (start, stop) in zip(views, spans, strict=True):
            self._memory[slot][start:stop] = view
        return Parcel(slot, header, tuple(spans))

    def unpack(self, packed: Any) -> Any:
        """Return a packed value, whose arrays stay valid until their slot is filled again."""
        if not isinstance(packed, Parcel):
            return packed
        memory = self._memory[packed.slot]
        return pickle.loads(packed.header, buffers=[memory[start:stop] for start, stop in packed.spans])
