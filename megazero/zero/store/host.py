"""`HostTier`: the host's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.errors import OffloadError
from megazero.host_memory import available_memory
from megazero.mpu.slab import Slab
from megazero.zero.store.tier import StillTier, TierSlot


class HostTier(StillTier):
    """Keeps tensors in the host's memory, where they are worked on too, so nothing is moved.

    Args:
        slab: the memory; by default, no device copies from and to it by itself.
    """

    name = "cpu"

    def __init__(self, slab: Slab | None = None):
        self._slab = slab or Slab()
        self._kept: dict[TierSlot, Tensor] = {}

    def make(self, numel: int, dtype: torch.dtype, lead: int = 0) -> TierSlot:
        slot = TierSlot(numel, dtype, lead)
        available = available_memory()
        if slot.nbytes > available:
            raise OffloadError(
                f"the host must have room for another {_gib(slot.nbytes)} of offloaded state beyond the "
                f"{_gib(self.nbytes)} of this rank, but has {_gib(available)}; offload to disk, or use more "
                "hosts"
            )
        # Writing makes the system set the room aside now, and not when training is under way.
        self._kept[slot] = self._slab.take(lead + slot.nbytes)[lead:].zero_().view(dtype)
        return slot

    def fetch(self, slot: TierSlot) -> Tensor:
        return self._kept[slot]

    def blank(self, slot: TierSlot) -> Tensor:
        return self._kept[slot]

    def put(self, slot: TierSlot, content: Tensor) -> None:
        assert content is self._kept[slot], "what is worked on is what is kept"

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._kept)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
