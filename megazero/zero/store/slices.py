"""`Slices`: slices of weights that a tier keeps, on their way to the device, some of them ahead of time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.mpu.streams import REACHED, Point
from megazero.zero.store.ferry import Ferry, Loan
from megazero.zero.store.tier import Tier, TierSlot


class Slices:
    """Reads slices for gathers.

    Where the device's memory is apart, a slice that is read ahead goes on to the device as soon as the tier
    has it; at most as many are there as are read ahead.

    Args:
        tier: keeps them.
        ferry: copies.

    Attributes:
        most_bytes: the most bytes of slices on the device that nobody had asked for yet.
    """

    def __init__(self, tier: Tier, ferry: Ferry):
        self._tier = tier
        self._ferry = ferry
        self._ahead: set[TierSlot] = set()
        self._lifted: dict[TierSlot, tuple[Tensor, Point]] = {}
        self.most_bytes = 0

    def read_ahead(self, wanted: Sequence[TierSlot], device: torch.device) -> None:
        """Start to read these slices, and drop others that were read ahead."""
        for slot in self._ahead.difference(wanted):
            if slot in self._lifted:
                on_device, point = self._lifted.pop(slot)
                point.compute_waits()
                del on_device  # now its memory may be used for something else
            else:
                self._tier.drop(slot, self._tier.fetch(slot))
        self._ahead = set(wanted)
        for slot in wanted:
            if slot not in self._lifted:
                self._ferry.settle(slot)
                self._tier.prefetch(slot)
                if self._ferry.apart and self._tier.ready(slot):
                    self._lifted[slot] = self._lift(slot, device)
        held = sum(on_device.nbytes for on_device, _ in self._lifted.values())
        self.most_bytes = max(self.most_bytes, held)

    def take(self, slot: TierSlot, device: torch.device) -> Tensor:
        """A slice on the device."""
        on_device, point = self._lifted.pop(slot) if slot in self._lifted else self._lift(slot, device)
        self._ahead.discard(slot)
        point.compute_waits()
        return on_device

    def _lift(self, slot: TierSlot, device: torch.device) -> tuple[Tensor, Point]:
        """Start to copy a slice to the device: the copy, and its end."""
        self._ferry.settle(slot)
        content = self._tier.fetch(slot)
        if not self._ferry.apart:
            on_device = content.to(device, copy=not self._tier.in_place)
            self._tier.drop(slot, content)
            return on_device, REACHED
        on_device = torch.empty_like(content, device=device)
        point = self._ferry.streams.copy(on_device, content)
        self._ferry.lend(Loan(self._tier, slot, content, point))
        return on_device, point
