"""Inputs of recomputed units: copied to the host during forward, and back one unit ahead of backward."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.mpu.slab import Slab
from megazero.mpu.streams import Point, Streams


class Shelf:
    """A pool of host memory for inputs.

    Args:
        streams: those of the device.

    Attributes:
        nbytes: the bytes of this memory.
    """

    def __init__(self, streams: Streams):
        self.streams = streams
        self.nbytes = 0
        self._slab = Slab(streams)
        self._free: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        """Memory in the shape and dtype of `like`; free memory that is too small is released first."""
        fitting = [memory for memory in self._free if memory.nbytes >= like.nbytes]
        chosen = min(fitting or self._free, key=lambda memory: memory.nbytes, default=None)
        self._free = [memory for memory in self._free if memory is not chosen]
        if not fitting:
            size = like.nbytes
            self.nbytes += size - (0 if chosen is None else chosen.nbytes)
            # Of a plan it is none of the device's memory, which a meter of the meta device counts.
            planned = like.is_meta
            chosen = like.new_empty(1, dtype=torch.uint8).expand(size) if planned else self._slab.take(size)
        assert chosen is not None, "a new one, or one that fits"
        return chosen

    def give_back(self, memory: Tensor) -> None:
        """Take back memory. Queued copies may still use it, since those of its next user are queued after
        them.
        """
        self._free.append(memory)


class AwayInput:
    """The input of a unit, which is on the host from when the next unit runs until shortly before its
    backward.

    Args:
        x: the input, or this rank's part of it, on the device.
        shelf: has memory on the host.
        before: the input of the preceding unit, whose backward follows this one's.
    """

    def __init__(self, x: Tensor, shelf: Shelf, before: AwayInput | None):
        self._shelf = shelf
        self._before = before
        # In the order in which memory has it: with other strides, other sums may be computed from it.
        self._dims = sorted(range(x.dim()), key=lambda dim: x.stride()[dim], reverse=True)
        self._here: Tensor | None = x.permute(self._dims).contiguous()
        self._like = x.new_empty(0), self._here.shape
        self._memory = shelf.take(self._here)
        self._moving: Point = shelf.streams.copy(self._on_host(), self._here)

    def leave(self) -> None:
        """Free the input on the device."""
        self._moving.compute_waits()  # its memory is used for something else then
        self._here = None

    def fetch(self) -> None:
        """Start to copy the input to the device."""
        if self._here is None:
            empty, shape = self._like
            self._here = empty.new_empty(shape)
            self._moving = self._shelf.streams.copy(self._here, self._on_host())

    def take(self) -> Tensor:
        """Return the input on the device, and start to fetch the preceding unit's."""
        self.fetch()
        if self._before is not None:
            self._before.fetch()
        here = self._here
        assert here is not None, "it has been fetched"
        self.leave()
        return here.permute([self._dims.index(dim) for dim in range(here.dim())])

    def _on_host(self) -> Tensor:
        empty, shape = self._like
        if self._memory.is_meta:
            return self._memory
        size = shape.numel() * empty.itemsize
        return self._memory[:size].view(empty.dtype).view(shape)

    def __del__(self) -> None:
        self._moving.compute_waits()
        self._shelf.give_back(self._memory)


class Pass:
    """Copies the inputs of one forward pass through some units to the host.

    Args:
        shelf: has memory on the host.
    """

    def __init__(self, shelf: Shelf):
        self._shelf = shelf
        self._last: AwayInput | None = None

    def send(self, x: Tensor) -> AwayInput:
        """Start to copy an input to the host, and free the preceding one on the device."""
        self.end()
        self._last = AwayInput(x, self._shelf, self._last)
        return self._last

    def end(self) -> None:
        """Free the last input on the device."""
        if self._last is not None:
            self._last.leave()
