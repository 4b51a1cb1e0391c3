"""`Slices`: reads slices of weights from a tier to the device, some of them ahead of time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.mpu.streams import REACHED, Point
from megazero.zero.store.tier import Tier, TierSlot
from megazero.zero.store.transfers import PendingRead, Transfers


class Slices:
    """Reads the slices of weights that gathers need.

    Where device and host memory are apart, a slice that is read ahead is also copied to the device as soon as
    the tier has it.

    Args:
        tier: keeps the slices.
        transfers: copies them.

    Attributes:
        most_bytes: the most bytes of slices that were on the device ahead of time.
    """

    def __init__(self, tier: Tier, transfers: Transfers):
        self._tier = tier
        self._transfers = transfers
        self._ahead: set[TierSlot] = set()
        self._on_device: dict[TierSlot, tuple[Tensor, Point]] = {}
        self.most_bytes = 0

    def read_ahead(self, wanted: Sequence[TierSlot], device: torch.device) -> None:
        """Start to read these slices, and drop others that were read ahead earlier."""
        for slot in self._ahead.difference(wanted):
            if slot in self._on_device:
                on_device, point = self._on_device.pop(slot)
                point.compute_waits()
                del on_device  # now its memory may be used for something else
            else:
                self._tier.drop(slot, self._tier.fetch(slot))
        self._ahead = set(wanted)
        for slot in wanted:
            if slot not in self._on_device:
                self._transfers.settle(slot)
                self._tier.prefetch(slot)
                if self._transfers.apart and self._tier.ready(slot):
                    self._on_device[slot] = self._start_copy(slot, device)
        held = sum(on_device.nbytes for on_device, _ in self._on_device.values())
        self.most_bytes = max(self.most_bytes, held)

    def take(self, slot: TierSlot, device: torch.device) -> Tensor:
        """Return a slice on the device, which computation may use at once."""
        started = self._on_device.pop(slot, None)
        on_device, point = started or self._start_copy(slot, device)
        self._ahead.discard(slot)
        point.compute_waits()
        return on_device

    def _start_copy(self, slot: TierSlot, device: torch.device) -> tuple[Tensor, Point]:
        """Start to copy a slice to the device; return the copy and its end."""
        self._transfers.settle(slot)
        content = self._tier.fetch(slot)
        if not self._transfers.apart:
            on_device = content.to(device, copy=not self._tier.in_place)
            self._tier.drop(slot, content)
            return on_device, REACHED
        on_device = torch.empty_like(content, device=device)
        point = self._transfers.streams.copy(on_device, content)
        self._transfers.read(PendingRead(self._tier, slot, content, point))
        return on_device, point
