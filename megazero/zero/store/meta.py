"""`MetaTier`: memory that only exists in a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.zero.store.tier import StillTier, TierSlot


class MetaTier(StillTier):
    """Keeps sizes alone, for a model on the meta device, so that a launch can be planned on a small machine.

    Args:
        name: the name of the tier that it stands for.
    """

    nbytes = 0

    def __init__(self, name: str):
        self.name = name

    def make(self, numel: int, dtype: torch.dtype, lead: int = 0) -> TierSlot:
        slot = TierSlot(numel, dtype, lead)
        self.nbytes += slot.nbytes
        return slot

    def fetch(self, slot: TierSlot) -> Tensor:
        return torch.empty(slot.numel, dtype=slot.dtype, device="meta")

    def blank(self, slot: TierSlot) -> Tensor:
        return self.fetch(slot)

    def put(self, slot: TierSlot, content: Tensor) -> None:
        return None
