"""Host memory between a run that continues and a checkpoint that is being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from megazero.checkpoint.part import Part
from megazero.host_memory import available_memory
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

    def has_room(self, parts: Sequence[Part]) -> bool:
        """Whether the host's memory has room for copies of these parts."""
        return self._is_for(parts) or _size([part.tensor for part in parts]) <= available_memory()

    def take(self, parts: Sequence[Part]) -> tuple[list[Part], Callable[[], None]]:
        """Parts on the host, and a function that fills them; originals must not change until it returns.

        Copies from a device whose memory is apart are queued here, after the work that is already queued;
        the function waits for them. It copies other memory itself, on any thread.
        """
        if not self._is_for(parts):
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

    def _is_for(self, parts: Sequence[Part]) -> bool:
        return len(parts) == len(self._copies) and all(
            (p.tensor.shape, p.tensor.dtype) == (c.shape, c.dtype)
            for p, c in zip(parts, self._copies, strict=True)
        )

    def _make(self, originals: Sequence[Tensor]) -> list[Tensor]:
        """Memory for copies of all of these."""
        memory = Slab(self._streams).take(_size(originals))
        places = zip(memory.split([_room(tensor) for tensor in originals]), originals, strict=True)
        return [place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for place, tensor in places]


def _size(originals: Sequence[Tensor]) -> int:
    return sum(_room(tensor) for tensor in originals)


def _room(tensor: Tensor) -> int:
    """Bytes of a copy's place."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
