"""`Kept`: the state that an offloading store has of one bucket, in tensors and in slots of tiers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.zero.store.tier import ALIGNMENT, Tier, TierSlot


@dataclass
class Kept:
    """The state that the store holds for a bucket: tensors on the device, and slots of tiers, by kind.

    Attributes:
        shard: this rank's slice of the weights, or its slot.
        weights: the weights over `state_range` on the device; None if only the slot of `shard` has them.
        sums: gradient sums on the device, [padded], or [shard_size] if sharded; None if there are none.
        state: masters, moments and gradient sums over `state_range`, or their slots.
    """

    shard: Tensor | TierSlot
    weights: Tensor | None
    sums: Tensor | None = None
    state: dict[str, Tensor | TierSlot] = field(default_factory=dict)


def of_slot(tier: Tier | None) -> Tier:
    """The tier of a slot."""
    assert tier is not None, "a slot belongs to a tier"
    return tier


def slot_of(shard: Tensor | TierSlot) -> TierSlot:
    """The slot of a slice of weights that is not on the device."""
    assert isinstance(shard, TierSlot), "without weights on the device, their slice is in a slot"
    return shard


def lead_of(first: int, dtype: torch.dtype) -> int:
    """Bytes from an aligned address to element `first` of an aligned buffer."""
    return first * dtype.itemsize % ALIGNMENT


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors of equal length are the same memory, also on the meta device."""
    storages = (x.untyped_storage()._cdata for x in (one, other))
    return len(set(storages)) == 1 and one.storage_offset() == other.storage_offset()
