"""`MetaTier`: memory that only exists in a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.zero.store.tier import Tier, TierSlot, Traffic


class MetaTier(Tier):
    """Keeps sizes alone, for a model on the meta device, so that a launch can be planned on a small machine.

    Args:
        name: the name of the tier that it stands for.
    """

    in_place = True
    nbytes = 0
    buffer_bytes = 0

    def __init__(self, name: str):
        self.name = name

    def make(self, numel: int, dtype: torch.dtype, lead: int = 0) -> TierSlot:
        slot = TierSlot(numel, dtype, lead)
        self.nbytes += slot.nbytes
        return slot

    def prefetch(self, slot: TierSlot) -> None:
        return None

    def ready(self, slot: TierSlot) -> bool:
        return True

    def fetch(self, slot: TierSlot) -> Tensor:
        return torch.empty(slot.numel, dtype=slot.dtype, device="meta")

    def blank(self, slot: TierSlot) -> Tensor:
        return self.fetch(slot)

    def put(self, slot: TierSlot, content: Tensor) -> None:
        return None

    def drop(self, slot: TierSlot, content: Tensor) -> None:
        return None

    def at_rest(self, slot: TierSlot) -> Tensor:
        return self.fetch(slot)

    def traffic(self) -> Traffic:
        return Traffic()
