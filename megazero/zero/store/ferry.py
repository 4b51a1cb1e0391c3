"""`Ferry`: takes a store's tensors between the device and the host, through few buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.mpu.slab import Slab
from megazero.mpu.streams import REACHED, Point, Streams
from megazero.zero.store.tier import Tier, TierSlot

_MOST_LENT = 2  # slots whose buffers in a tier are read by copies to the device


class Ring:
    """Buffers that are used in turn, each when its last copy is over.

    Args:
        count: how many.
        slab: makes them on the host; None for the device's, whose copies the device waits for, not the host.

    Attributes:
        size: bytes that each has at least.
        nbytes: bytes of all that were made.
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
        """The next buffer, in the shape of `like` and of a dtype."""
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
        """Note the copy after which the buffer that was taken last may be used again."""
        self._points[self._number] = point


@dataclass(frozen=True)
class Landing:
    """New content of a slot on its way from the device, or sums to add to its content.

    Attributes:
        there: the memory of the slot; None if what arrives is to be added.
        arriving: the memory on the host that it is copied to.
        point: the end of the copy.
    """

    tier: Tier
    slot: TierSlot
    there: Tensor | None
    arriving: Tensor
    point: Point

    @property
    def by_itself(self) -> bool:
        """Whether nothing is left to do once it has arrived."""
        return self.there is not None and self.tier.in_place

    def end(self) -> None:
        """Wait for it, and keep it."""
        self.point.host_waits()
        there = self.there
        if there is None:
            there = self.tier.fetch(self.slot)
            there.add_(self.arriving)
        self.tier.put(self.slot, there)


@dataclass(frozen=True)
class Loan:
    """Content of a slot in a buffer of its tier, which a copy to the device reads."""

    tier: Tier
    slot: TierSlot
    content: Tensor
    point: Point

    def end(self) -> None:
        """Wait for the copy, and let go of the content."""
        self.point.host_waits()
        self.tier.drop(self.slot, self.content)


class Ferry:
    """Copies a store's tensors between the device and tiers, beside what the device computes.

    What is on its way is settled when its slot is next touched on the host, and at the latest when the next
    of its kind has set out and the host has work to do for it. Where device and host are apart, there is one
    buffer on the device, for what would be overwritten there before it has arrived, and there are four on the
    host: two for sums, two for weights on their way back. Each has the size of the largest slice of state.
    Where they are not, there is none, and nothing is on its way.

    Args:
        streams: the device's.

    Attributes:
        streams: the device's.
        apart: as that of `streams`.
    """

    def __init__(self, streams: Streams):
        slab = Slab(streams)
        self.streams = streams
        self.apart = streams.apart
        self._leaving = Ring(1, None)
        self._sums, self._weights = Ring(2, slab), Ring(2, slab)
        self._landings: dict[TierSlot, Landing] = {}
        self._loans: dict[TierSlot, Loan] = {}

    @property
    def buffer_bytes(self) -> tuple[int, int]:
        """Bytes of buffers on the device and on the host."""
        return self._leaving.nbytes, self._sums.nbytes + self._weights.nbytes

    def expect(self, size: int) -> None:
        """Make buffers that are made from now on large enough for so many bytes."""
        for ring in (self._leaving, self._sums, self._weights):
            ring.size = max(ring.size, size)

    def lower(self, source: Tensor, target: Tensor, *, lasting: bool = False) -> Point:
        """Copy from the device to memory on the host.

        Args:
            source: contiguous; of any dtype.
            target: as large.
            lasting: whether the caller waits for the point before it changes `source` or lets go of it.
        """
        if not self.apart:
            target.copy_(source)
            return REACHED
        if lasting and source.dtype == target.dtype:
            return self.streams.copy(target, source)
        leaving = self.leaving(source, target.dtype)
        leaving.copy_(source)
        return self.left(target, leaving)

    def lower_sums(self, source: Tensor, *, lasting: bool) -> tuple[Tensor, Point]:
        """Copy sums to a buffer on the host: it, and the end of the copy; both are gone two calls later."""
        if not self.apart:
            return (source if source.is_meta else source.cpu()), REACHED
        arriving = self._sums.take(source, source.dtype)
        point = self.lower(source, arriving, lasting=lasting)
        self._sums.until(point)
        return arriving, point

    def leaving(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The buffer on the device, for what `left` takes to the host."""
        return self._leaving.take(like, dtype)

    def left(self, target: Tensor, leaving: Tensor) -> Point:
        """Copy the buffer on the device to the host."""
        point = self.streams.copy(target, leaving)
        self._leaving.until(point)
        return point

    def new_weights(self, like: Tensor) -> Tensor:
        """A buffer on the host for weights that `lift_weights` takes to the device."""
        return self._weights.take(like, like.dtype)

    def lift_weights(self, written: Tensor, target: Tensor) -> None:
        """Copy the buffer of weights that was taken last to the device, which waits for it."""
        point = self.streams.copy(target, written)
        self._weights.until(point)
        point.compute_waits()

    def land(self, landing: Landing) -> None:
        """Let something arrive; the host then finishes what set out before."""
        for slot in [slot for slot, other in self._landings.items() if not other.by_itself]:
            self._landings.pop(slot).end()
        if landing.point.reached:
            landing.end()
        else:
            self._landings[landing.slot] = landing

    def lend(self, loan: Loan) -> None:
        """Let a copy to the device read a slot.

        A slot kept in place needs no return: its next write follows the copy of this bucket's gradients to
        the host, which is queued after the read.
        """
        if loan.tier.in_place:
            return
        self._loans[loan.slot] = loan
        for slot in list(self._loans)[:-_MOST_LENT]:
            self._loans.pop(slot).end()

    def settle(self, slot: TierSlot) -> None:
        """Wait until the host has the slot for itself, with all that was on its way to it."""
        self.arrive(slot)
        loan = self._loans.pop(slot, None)
        if loan is not None:
            loan.end()

    def arrive(self, slot: TierSlot) -> None:
        """Wait until the host can read what was on its way to the slot."""
        landing = self._landings.pop(slot, None)
        if landing is not None:
            landing.end()
