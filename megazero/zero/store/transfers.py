"""`Transfers`: copies a store's tensors between the device and the host through a few buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.mpu.slab import Slab
from megazero.mpu.streams import REACHED, Point, Streams
from megazero.zero.store.tier import Tier, TierSlot

_MOST_READS = 2  # slots whose buffers in a tier copies to the device may be reading


class Ring:
    """Buffers that are used in turn, each once the last copy that used it is over.

    Args:
        count: the number of buffers.
        slab: allocates them on the host; None for buffers on the device, where the device waits for the copy
            and the host does not.

    Attributes:
        size: the fewest bytes that a new buffer gets.
        nbytes: the bytes of all buffers allocated so far.
    """

    def __init__(self, count: int, slab: Slab | None):
        self._slab = slab
        self._buffers: list[Tensor | None] = [None] * count
        self._points: list[Point] = [REACHED] * count
        self._number = -1
        self.size = 0

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    def take(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The next buffer, viewed as a tensor of `dtype` in the shape of `like`."""
        self._number = (self._number + 1) % len(self._buffers)
        point = self._points[self._number]
        point.compute_waits() if self._slab is None else point.host_waits()
        size, memory = like.numel() * dtype.itemsize, self._buffers[self._number]
        if memory is None or memory.nbytes < size:
            wanted = max(size, self.size)
            if self._slab is None or like.is_meta:
                memory = torch.empty(wanted, dtype=torch.uint8, device=like.device)
            else:
                memory = self._slab.take(wanted)
            self._buffers[self._number] = memory
        return memory[:size].view(dtype).view(like.shape)

    def until(self, point: Point) -> None:
        """Reuse the buffer that was taken last only after `point`, the end of the copy that uses it."""
        self._points[self._number] = point


@dataclass(frozen=True)
class PendingWrite:
    """A copy from the device that is to replace a slot's content, or to be added to it.

    Attributes:
        target: the slot's own memory; None if the data is to be added to its content.
        arriving: the host memory that the copy fills.
        point: the end of the copy.
    """

    tier: Tier
    slot: TierSlot
    target: Tensor | None
    arriving: Tensor
    point: Point

    @property
    def complete_on_arrival(self) -> bool:
        """Whether the host has nothing left to do once the data has arrived."""
        return self.target is not None and self.tier.in_place

    def end(self) -> None:
        """Wait for the data, then store it in the slot."""
        self.point.host_waits()
        target = self.target
        if target is None:
            target = self.tier.fetch(self.slot)
            target.add_(self.arriving)
        self.tier.put(self.slot, target)


@dataclass(frozen=True)
class PendingRead:
    """A copy to the device that still reads a slot's content from a buffer of its tier."""

    tier: Tier
    slot: TierSlot
    content: Tensor
    point: Point

    def end(self) -> None:
        """Wait for the copy, then release the buffer."""
        self.point.host_waits()
        self.tier.drop(self.slot, self.content)


class Transfers:
    """Copies a store's tensors between the device and its tiers while the device computes.

    A pending copy is finished when the host next touches its slot, or else when a later copy of the same kind
    starts and the host has work left to do for this one.

    Where device and host memory are apart, there is one buffer on the device, for data that would otherwise
    be overwritten before it is copied, and there are four on the host: two for gradient sums and two for
    weights on their way back. Each is as large as the largest slice of state. Where they are one memory,
    there are no buffers and no pending copies.

    Args:
        streams: the device's.

    Attributes:
        streams: the device's.
        apart: whether device and host memory are apart.
    """

    def __init__(self, streams: Streams):
        slab = Slab(streams)
        self.streams = streams
        self.apart = streams.apart
        self._outgoing = Ring(1, None)
        self._sums, self._weights = Ring(2, slab), Ring(2, slab)
        self._writes: dict[TierSlot, PendingWrite] = {}
        self._reads: dict[TierSlot, PendingRead] = {}

    @property
    def buffer_bytes(self) -> tuple[int, int]:
        """Bytes of buffers on the device and on the host."""
        return self._outgoing.nbytes, self._sums.nbytes + self._weights.nbytes

    def expect(self, size: int) -> None:
        """Give every buffer that is allocated from now on at least `size` bytes."""
        for ring in (self._outgoing, self._sums, self._weights):
            ring.size = max(ring.size, size)

    def to_host(self, source: Tensor, target: Tensor, *, lasting: bool = False) -> Point:
        """Start to copy from the device to host memory.

        Args:
            source: contiguous; of any dtype.
            target: host memory with as many elements.
            lasting: whether the caller keeps `source` unchanged until the returned point; otherwise it is
                copied through a buffer on the device.

        Returns:
            The end of the copy.
        """
        if not self.apart:
            target.copy_(source)
            return REACHED
        if lasting and source.dtype == target.dtype:
            return self.streams.copy(target, source)
        buffer = self.outgoing(source, target.dtype)
        buffer.copy_(source)
        return self.outgoing_to_host(target, buffer)

    def sums_to_host(self, source: Tensor, *, lasting: bool) -> tuple[Tensor, Point]:
        """Start to copy sums to the host; return the buffer and the end of the copy.

        The call after the next one uses the buffer again.
        """
        if not self.apart:
            return (source if source.is_meta else source.cpu()), REACHED
        arriving = self._sums.take(source, source.dtype)
        point = self.to_host(source, arriving, lasting=lasting)
        self._sums.until(point)
        return arriving, point

    def outgoing(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The buffer on the device that `outgoing_to_host` copies."""
        return self._outgoing.take(like, dtype)

    def outgoing_to_host(self, target: Tensor, buffer: Tensor) -> Point:
        """Start to copy the buffer from `outgoing` to host memory; return the end of the copy."""
        point = self.streams.copy(target, buffer)
        self._outgoing.until(point)
        return point

    def weights_buffer(self, like: Tensor) -> Tensor:
        """A host buffer for new weights, which `weights_to_device` copies."""
        return self._weights.take(like, like.dtype)

    def weights_to_device(self, written: Tensor, target: Tensor) -> None:
        """Copy the buffer from `weights_buffer` to the device, whose computation waits for it."""
        point = self.streams.copy(target, written)
        self._weights.until(point)
        point.compute_waits()

    def write(self, pending: PendingWrite) -> None:
        """Keep track of a write, after finishing earlier ones that need the host."""
        for slot in [slot for slot, other in self._writes.items() if not other.complete_on_arrival]:
            self._writes.pop(slot).end()
        if pending.point.reached:
            pending.end()
        else:
            self._writes[pending.slot] = pending

    def read(self, pending: PendingRead) -> None:
        """Keep a slot's buffer until a copy to the device has read it.

        A slot kept in place has no buffer to release: its next write follows the copy of this bucket's
        gradients to the host, which is queued after the read.
        """
        if pending.tier.in_place:
            return
        self._reads[pending.slot] = pending
        for slot in list(self._reads)[:-_MOST_READS]:
            self._reads.pop(slot).end()

    def settle(self, slot: TierSlot) -> None:
        """Finish all copies from and to a slot, so that the host may change it."""
        self.finish_write(slot)
        pending = self._reads.pop(slot, None)
        if pending is not None:
            pending.end()

    def finish_write(self, slot: TierSlot) -> None:
        """Finish the pending write to a slot, if any, so that the host may read it."""
        pending = self._writes.pop(slot, None)
        if pending is not None:
            pending.end()
