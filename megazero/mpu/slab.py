"""`Slab`: memory of the host in whole pages, which a device copies from and to by itself."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from megazero.mpu.streams import INLINE, Streams


class Pages(mmap.mmap):
    """Memory of this process alone, of zeros, in whole pages; it is unlocked before it is unmapped."""

    unlock: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


class Slab:
    """Makes memory of the host: ordinary pages, locked one piece at a time.

    torch's own locked memory is rounded up to powers of two, so it may take twice what is asked for. A copy
    may not cross two locked pieces, so each lies in one of its own, rounded up to whole pages.

    Args:
        streams: those of the device that copies; by default, none does.
    """

    def __init__(self, streams: Streams = INLINE):
        self._streams = streams

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
        """New memory as a tensor: uint8 [size]."""
        return torch.frombuffer(self.pages(size), dtype=torch.uint8)[:size]
