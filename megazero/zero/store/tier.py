"""`Tier`: memory beyond the device's, which keeps flat tensors between visits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes to whose multiples torch aligns memory on the host."""


@dataclass(eq=False)
class TierSlot:
    """A flat tensor's place in a tier.

    Attributes:
        numel: number of elements.
        dtype: their type.
        lead: bytes from a multiple of `ALIGNMENT` to the first element; how a sum rounds depends on it.
        start: its place in the tier, in bytes; each tier counts its own way.
    """

    numel: int
    dtype: torch.dtype
    lead: int = 0
    start: int = 0

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Traffic:
    """The bytes that a tier has moved since it was made, and the time that took.

    Attributes:
        read, written: bytes.
        waited: seconds in which a step waited for reads and writes.
    """

    read: int = 0
    written: int = 0
    waited: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written, self.waited + other.waited)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.read - other.read, self.written - other.written, self.waited - other.waited)


class Tier(Protocol):
    """Memory for flat tensors, in which each has a slot.

    A slot is worked on in a tensor on the host, from `fetch` or `blank` to `put` or `drop`.
    """

    name: str
    """Its name in messages and reports: ``cpu`` or ``nvme``."""

    in_place: bool
    """Whether content is worked on where it is kept."""

    def make(self, numel: int, dtype: torch.dtype, lead: int = 0) -> TierSlot:
        """A new slot of zeros.

        Raises:
            OffloadError: there is no room for it.
        """

    def prefetch(self, slot: TierSlot) -> None:
        """Start to read the slot, so that the next `fetch` waits less."""

    def ready(self, slot: TierSlot) -> bool:
        """Whether `fetch` would not wait."""

    def fetch(self, slot: TierSlot) -> Tensor:
        """The slot's content to work on: flat, on the host.

        Raises:
            OffloadError: it cannot be read, or the content put before could not be written.
        """

    def blank(self, slot: TierSlot) -> Tensor:
        """A tensor for new content of the slot; it holds anything."""

    def put(self, slot: TierSlot, content: Tensor) -> None:
        """Start to keep the content that `fetch` or `blank` gave; the caller lets go of the tensor."""

    def drop(self, slot: TierSlot, content: Tensor) -> None:
        """Let go of unchanged content."""

    def at_rest(self, slot: TierSlot) -> Tensor:
        """The slot where it is kept, for reading and writing while nothing is fetched or put."""

    def traffic(self) -> Traffic:
        """The traffic so far."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory for buffers, in use or not."""


class StillTier(Tier):
    """A tier whose content is worked on where it is kept, so that nothing is moved."""

    in_place = True
    buffer_bytes = 0

    def prefetch(self, slot: TierSlot) -> None:
        return None  # it is here

    def ready(self, slot: TierSlot) -> bool:
        return True

    def drop(self, slot: TierSlot, content: Tensor) -> None:
        return None

    def at_rest(self, slot: TierSlot) -> Tensor:
        return self.fetch(slot)

    def traffic(self) -> Traffic:
        return Traffic()
