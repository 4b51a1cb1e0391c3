"""`HostTier`: the host's memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
from torch import Tensor

from megazero.errors import OffloadError
from megazero.mpu.slab import Slab
from megazero.zero.store.tier import StillTier, TierSlot

_GROUPS = Path("/sys/fs/cgroup")
_CGROUPS = (
    (_GROUPS / "memory.max", _GROUPS / "memory.current"),
    (_GROUPS / "memory/memory.limit_in_bytes", _GROUPS / "memory/memory.usage_in_bytes"),
)


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


def available_memory() -> int:
    """Bytes of memory that this process can still get, on the host and in its control group."""
    limits = [_from_meminfo()]
    for limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # such as "max", or none of that version
            limits.append(int(limit.read_text()) - int(used.read_text()))
    return min(limits)


def _from_meminfo() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kib << 10


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
