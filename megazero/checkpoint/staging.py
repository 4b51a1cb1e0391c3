"""Host memory between a run that continues and a checkpoint that is being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from megazero.checkpoint.part import Part
from megazero.mpu.slab import Slab
from megazero.mpu.streams import INLINE, REACHED, Streams

_ALIGNMENT = 64


class Staging:
    """Host memory that parts are copied to, in one piece, kept from one checkpoint to the next.

    Args:
        streams: those of the device.
    """

    def __init__(self, streams: Streams = INLINE) -> None:
        self._streams = streams
        self._copies: list[Tensor] = []

    def take(self, parts: Sequence[Part]) -> tuple[list[Part], Callable[[], None]]:
        """Parts on the host, and a function that fills them; originals must not change until it returns.

        Copies from a device whose memory is apart are queued here, after the work that is already queued;
        the function waits for them. It copies other memory itself, on any thread.
        """
        alike = len(parts) == len(self._copies) and all(
            (p.tensor.shape, p.tensor.dtype) == (c.shape, c.dtype)
            for p, c in zip(parts, self._copies, strict=True)
        )
        if not alike:
            self._copies = self._make([part.tensor for part in parts])
        pairs = [(copy, part.tensor) for part, copy in zip(parts, self._copies, strict=True)]
        here = [(copy, tensor) for copy, tensor in pairs if not self._streams.holds(tensor)]
        queued = [(copy, tensor.contiguous()) for copy, tensor in pairs if self._streams.holds(tensor)]
        points = [REACHED, *(self._streams.copy(copy, tensor) for copy, tensor in queued)]

        def fill() -> None:
            for copy, tensor in here:
                copy.copy_(tensor)
            points[-1].host_waits()  # copies are made in order
            queued.clear()

        return [replace(part, tensor=copy) for part, (copy, _) in zip(parts, pairs, strict=True)], fill

    def _make(self, originals: Sequence[Tensor]) -> list[Tensor]:
        """Memory for copies of all of these."""
        starts, size = [], 0
        for tensor in originals:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = Slab(self._streams).take(size)
        return [
            memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, originals, strict=True)
        ]
