"""`Slab`: host memory in whole locked pages, which a device can copy from and to by itself."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from megazero.mpu.streams import INLINE, Streams


class Pages(mmap.mmap):
    """Private zeroed memory in whole pages, which is unlocked before it is unmapped."""

    unlock: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


_LINE = 64
_STEP = 5 * _LINE  # odd in lines, so that all offsets in a page have their turn


class Slab:
    """Allocates host memory: ordinary pages, locked one piece at a time.

    torch's own locked memory is rounded up to powers of two, so it may take twice what is asked for. A copy
    may not cross two locked pieces, so each lies in one of its own, rounded up to whole pages.

    Pieces begin at different offsets of their pages: work on several at a time, such as an update, would
    otherwise use the same few lines of a cache for all of them (a sixth slower for Adam, measured).

    Args:
        streams: the streams of the device that copies; without them, torch allocates the memory.
    """

    def __init__(self, streams: Streams = INLINE):
        self._streams = streams
        self._offset = 0

    def pages(self, size: int) -> Pages:
        """New memory of at least `size` bytes.

        Raises:
            OSError: there is no room for it.
        """
        size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = Pages(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.unlock = self._streams.lock(torch.frombuffer(pages, dtype=torch.uint8).data_ptr(), size)
        return pages

    def take(self, size: int) -> Tensor:
        """New memory as a tensor: uint8 [size], with any content; it begins at a multiple of 64 bytes."""
        if self._streams is INLINE:
            return torch.empty(size, dtype=torch.uint8)
        offset, self._offset = self._offset, (self._offset + _STEP) % mmap.PAGESIZE
        return torch.frombuffer(self.pages(offset + size), dtype=torch.uint8)[offset : offset + size]
