"""Host memory for copies of a checkpoint's tensors, from which files are written while training goes on."""

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
    """One allocation of host memory for copies of parts, reused from one checkpoint to the next.

    Args:
        streams: the device's streams.
    """

    def __init__(self, streams: Streams = INLINE) -> None:
        self._streams = streams
        self._copies: list[Tensor] = []

    def has_room(self, parts: Sequence[Part]) -> bool:
        """Whether host memory suffices for copies of these parts."""
        return self._is_for(parts) or _size([part.tensor for part in parts]) <= available_memory()

    def take(self, parts: Sequence[Part]) -> tuple[list[Part], Callable[[], None]]:
        """Return parts on the host, and a function that fills them.

        The originals must not change until the function returns. Copies from device memory are queued here,
        behind the work already queued; the function waits for them. It copies host memory itself and may be
        called on any thread.
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
            points[-1].host_waits()  # copies run in order, so the last one is enough
            queued.clear()

        return [replace(part, tensor=copy) for part, (copy, _) in zip(parts, pairs, strict=True)], fill

    def _is_for(self, parts: Sequence[Part]) -> bool:
        return len(parts) == len(self._copies) and all(
            (p.tensor.shape, p.tensor.dtype) == (c.shape, c.dtype)
            for p, c in zip(parts, self._copies, strict=True)
        )

    def _make(self, originals: Sequence[Tensor]) -> list[Tensor]:
        memory = Slab(self._streams).take(_size(originals))
        places = zip(memory.split([_room(tensor) for tensor in originals]), originals, strict=True)
        return [place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for place, tensor in places]


def _size(originals: Sequence[Tensor]) -> int:
    return sum(_room(tensor) for tensor in originals)


def _room(tensor: Tensor) -> int:
    """Bytes of a copy, rounded up to the alignment."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
