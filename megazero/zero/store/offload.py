"""`OffloadStore`: state that sleeps in the host's memory or on disk, and is updated on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from megazero.zero.bucket import Bucket
from megazero.zero.layout import own_sums
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.store import GRADIENT, WEIGHT, LoadedBucket, Sizes, add_up, held_as
from megazero.zero.store.tier import ALIGNMENT, Tier, TierSlot

_HOST = torch.device("cpu")
_AHEAD = 1  # buckets whose state is read while one is worked on


@dataclass(frozen=True)
class StatePlacement:
    """What is kept where; None is the device.

    Attributes:
        state: the tier of masters and moments.
        gradients: the tier of gradient sums, of buckets whose masters and moments are in a tier too.
        parameters: the tier of the slices of weights that ZeRO stage 3 shards.
        fraction: the share of the elements whose masters and moments are in `state`; those of the others stay
            on the device, whole buckets each (twin-flow of ZeRO-Offload++).
    """

    state: Tier | None = None
    gradients: Tier | None = None
    parameters: Tier | None = None
    fraction: float = 1.0

    @property
    def updates_on_host(self) -> bool:
        """Whether all masters, moments and sums are worked on where they are kept, in the host's memory."""
        places = (self.state, self.gradients)
        return self.fraction == 1.0 and all(tier is not None and tier.in_place for tier in places)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers, each once."""
        return tuple(dict.fromkeys(t for t in (self.state, self.gradients, self.parameters) if t is not None))


@dataclass
class _Kept:
    """What the store holds for a bucket: tensors on the device, and slots of tiers, by kind.

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


class OffloadStore:
    """Keeps what a placement says in its tiers, and brings it to the host bucket by bucket.

    State that is in a tier is updated on the host (ZeRO-Offload, Ren et al. 2021); while one bucket is
    worked on, the next one is read and the last one written (ZeRO-Infinity, Rajbhandari et al. 2021). What
    the update begins with is read beside the backward before it, into buffers that the last update left.
    Sums and norms round as those of `DeviceStore` do.

    Args:
        policy: the dtypes of masters and sums.
        placement: what is kept where.

    Attributes:
        updates: updates of buckets that run on another thread; whatever touches their state waits for them.
    """

    def __init__(self, policy: ZeroPolicy, placement: StatePlacement):
        self.policy = policy
        self.placement = placement
        self.buckets: list[Bucket] = []
        self.tiers = placement.tiers
        self.offloaded: dict[Bucket, set[str]] = {}
        self._kept: dict[Bucket, _Kept] = {}
        self.updates: dict[Bucket, Future[None]] = {}
        self._elements = self._offloaded = 0
        self._ahead: set[TierSlot] = set()  # slices that are being read before they are asked for

    def admit(self, bucket: Bucket) -> None:
        layout, full = bucket.layout, bucket.full
        own = full[layout.own]
        if layout.row.shard_params and self.placement.parameters is not None:
            shard = self._put_away(self.placement.parameters, own, 0)
            weights, source = None, own
        else:
            shard = own.clone() if layout.row.shard_params else own
            weights = source = shard if layout.row.shard_state else full
        kept = _Kept(shard, weights)
        if bucket.key.trainable:
            self._admit_state(bucket, kept, source)
        else:
            kept.state[WEIGHT] = shard if weights is None else weights
        self.buckets.append(bucket)
        self._kept[bucket] = kept
        self._note_asleep(bucket)

    def make_moments(
        self, init_state: Callable[[Bucket, Tensor], dict[str, Tensor]], buckets: Sequence[Bucket]
    ) -> None:
        for bucket in buckets:
            state = self._kept[bucket].state
            for loaded_buckets in self.stream((WEIGHT,), [bucket]):
                made = init_state(bucket, loaded_buckets[0].flats[WEIGHT].float())
            if isinstance(state[WEIGHT], TierSlot):
                made = {kind: self._put_away(self.placement.state, flat, 0) for kind, flat in made.items()}
            state.update(made)
            self._note_asleep(bucket)

    def read_ahead(self, buckets: Sequence[Bucket]) -> None:
        tier, slots = self.placement.parameters, [self._kept[bucket].shard for bucket in buckets]
        wanted = dict.fromkeys(slot for slot in slots if isinstance(slot, TierSlot))
        for slot in self._ahead - wanted.keys():
            tier.drop(slot, tier.fetch(slot))
        for slot in wanted:
            tier.prefetch(slot)
        self._ahead = set(wanted)

    def shard(self, bucket: Bucket) -> Tensor:
        shard = self._kept[bucket].shard
        if not isinstance(shard, TierSlot):
            return shard
        tier = self.placement.parameters
        found = tier.fetch(shard)
        self._ahead.discard(shard)
        there = found.to(bucket.full.device, copy=not tier.in_place)
        tier.drop(shard, found)
        return there

    def open_weights(self, bucket: Bucket) -> Tensor | None:
        kept = self._kept[bucket]
        master, weights = kept.state[WEIGHT], kept.weights
        if master is kept.shard or master is weights:
            return None
        if weights is None:
            return self.placement.parameters.blank(kept.shard)
        if isinstance(master, TierSlot) and weights.device.type not in ("cpu", "meta"):
            return torch.empty(weights.shape, dtype=weights.dtype, pin_memory=self.placement.state.pin)
        return weights

    def close_weights(self, bucket: Bucket, weights: Tensor) -> None:
        kept = self._kept[bucket]
        if kept.weights is None:
            self.placement.parameters.put(kept.shard, weights)
        elif weights is not kept.weights:
            kept.weights.copy_(weights, non_blocking=True)

    def adopt(self, bucket: Bucket) -> None:
        self._finish(bucket)
        kept, layout = self._kept[bucket], bucket.layout
        own = bucket.full[layout.own]
        if isinstance(kept.shard, TierSlot):
            self._fill(self.placement.parameters, kept.shard, own)
        elif layout.row.shard_params:
            kept.shard.copy_(own)
        master, weights = kept.state[WEIGHT], own if kept.weights is None else kept.weights
        if master is kept.shard:
            return
        if isinstance(master, TierSlot):
            self._fill(self.placement.state, master, weights)
        elif master is not weights:
            master.copy_(weights)

    def sums(self, bucket: Bucket) -> Tensor:
        sums = self._kept[bucket].sums
        assert sums is not None, "a frozen bucket has no gradients"
        return sums

    @torch.no_grad()
    def accumulate(self, bucket: Bucket, result: Tensor, *, first: bool) -> None:
        self._finish(bucket)
        self._read_for_update()
        sums = self._kept[bucket].state[GRADIENT]
        if not isinstance(sums, TierSlot):
            if result.data_ptr() != sums.data_ptr():  # otherwise they were reduced in place
                sums.copy_(result) if first else sums.add_(result)
            return
        tier = self.placement.gradients
        if first:
            self._fill(tier, sums, result)
            return
        tier.prefetch(sums)
        at = self.buckets.index(bucket)
        for other in self.buckets[at + 1 : at + 1 + _AHEAD]:
            self._prefetch(other, (GRADIENT,))
        there = tier.fetch(sums)
        there.add_(_on_host(result))
        tier.put(sums, there)

    def at_rest(self, bucket: Bucket) -> Mapping[str, Tensor]:
        self._finish(bucket)
        kept = self._kept[bucket]
        return {
            kind: self._tier_of(kept, kind).at_rest(held) if isinstance(held, TierSlot) else held
            for kind, held in kept.state.items()
            if kind != GRADIENT
        }

    @torch.no_grad()
    def stream(
        self, kinds: Collection[str], buckets: Sequence[Bucket], changes: Collection[str] = ()
    ) -> Iterator[Sequence[LoadedBucket]]:
        for number, bucket in enumerate(buckets):
            for other in buckets[number : number + 1 + _AHEAD]:
                self._prefetch(other, kinds)
            self._finish(bucket)
            visited = self._wake(bucket, kinds)
            try:
                yield [LoadedBucket(bucket, visited)]
            finally:  # a visitor may have seen enough
                self._to_sleep(bucket, visited, changes)

    def sizes(self) -> Sizes:
        items = [item for bucket in self.buckets for item in self._items(bucket)]
        buffers = [("cpu", "buffers", tier.buffer_bytes) for tier in self.placement.tiers]
        return add_up([*items, *(item for item in buffers if item[2])])

    def _read_for_update(self) -> None:
        """Start to read the masters and moments that the step's update begins with, if they are elsewhere."""
        updated = (bucket for bucket in self.buckets if bucket.key.trainable and self.offloaded[bucket])
        for bucket in islice(updated, 1 + _AHEAD):
            self._prefetch(bucket, self.offloaded[bucket])

    def _finish(self, bucket: Bucket) -> None:
        """Wait for the bucket's update."""
        update = self.updates.pop(bucket, None)
        if update is not None:
            update.result()

    def _note_asleep(self, bucket: Bucket) -> None:
        state = self._kept[bucket].state
        self.offloaded[bucket] = {
            k for k, held in state.items() if isinstance(held, TierSlot) and k != GRADIENT
        }

    def _items(self, bucket: Bucket) -> Iterator[tuple[str, str, int]]:
        kept = self._kept[bucket]
        weights = kept.shard if bucket.layout.row.shard_params else bucket.full
        place = self.placement.parameters.name if isinstance(weights, TierSlot) else "device"
        yield place, "weights", weights.nbytes
        for kind, held in kept.state.items():
            if isinstance(held, TierSlot):
                if held is not kept.shard:
                    yield self._tier_of(kept, kind).name, held_as(kind), held.nbytes
            elif kind != GRADIENT and held is not kept.weights and held is not kept.shard:
                yield "device", held_as(kind), held.nbytes
        if kept.sums is not None:
            yield "device", "gradients", kept.sums.nbytes

    def _admit_state(self, bucket: Bucket, kept: _Kept, weights: Tensor) -> None:
        """Give a trained bucket masters and gradient sums."""
        layout, policy, state = bucket.layout, self.policy, kept.state
        self._elements += layout.padded
        if self._offloads(bucket):
            self._offloaded += layout.padded
            lead = 0
            if not layout.row.shard_params and policy.main_dtype == bucket.key.dtype:
                lead = _lead(layout.state_range.start, policy.main_dtype)
            state[WEIGHT] = self._put_away(self.placement.state, weights.to(policy.main_dtype), lead)
        elif kept.weights is None:
            state[WEIGHT] = weights.to(policy.main_dtype, copy=True)
        else:
            state[WEIGHT] = kept.weights.to(policy.main_dtype, copy=policy.own_masters)
        dtype, sharded = policy.accumulation_dtype, layout.row.shard_grads
        tier = self.placement.gradients if isinstance(state[WEIGHT], TierSlot) else None
        if tier is None or not sharded:
            size = layout.shard_size if sharded else layout.padded
            kept.sums = bucket.full.new_zeros(size, dtype=dtype)
        if tier is None:
            state[GRADIENT] = own_sums(layout, kept.sums)
        else:
            lead = 0 if sharded else _lead(layout.state_range.start, dtype)
            state[GRADIENT] = tier.make(weights.numel(), dtype, lead)

    def _offloads(self, bucket: Bucket) -> bool:
        """Whether the masters and moments of a bucket, counted in `_elements` already, go to the tier.

        All ranks that hold copies of a parameter must answer alike. Replicas and slices have the same buckets
        in the same order. Pipeline stages do not, so what two of them hold goes by the fraction alone, and
        the buckets around it make up for it.
        """
        fraction = self.placement.fraction
        if self.placement.state is None:
            return False
        if any(spec.shared for spec in bucket.layout.specs):
            return fraction >= 0.5
        return self._offloaded + bucket.layout.padded <= fraction * self._elements

    def _put_away(self, tier: Tier, content: Tensor, lead: int) -> TierSlot:
        slot = tier.make(content.numel(), content.dtype, lead)
        self._fill(tier, slot, content)
        return slot

    @torch.no_grad()
    def _fill(self, tier: Tier, slot: TierSlot, content: Tensor) -> None:
        there = tier.blank(slot)
        there.copy_(content)
        tier.put(slot, there)

    def _tier_of(self, kept: _Kept, kind: str) -> Tier:
        if kind == GRADIENT:
            return self.placement.gradients
        return self.placement.parameters if kept.state[kind] is kept.shard else self.placement.state

    def _slots(self, bucket: Bucket, kinds: Collection[str]) -> dict[str, tuple[Tier, TierSlot]]:
        kept = self._kept[bucket]
        held = {kind: kept.state[kind] for kind in kinds if kind in kept.state}
        return {kind: (self._tier_of(kept, kind), s) for kind, s in held.items() if isinstance(s, TierSlot)}

    def _prefetch(self, bucket: Bucket, kinds: Collection[str]) -> None:
        for tier, slot in self._slots(bucket, kinds).values():
            tier.prefetch(slot)

    def _wake(self, bucket: Bucket, kinds: Collection[str]) -> dict[str, Tensor]:
        """All kinds of a bucket on one device: on the host if any of its state sleeps there."""
        state, slots = self._kept[bucket].state, self._slots(bucket, kinds)
        flats = {}
        for kind in (kind for kind in kinds if kind in state):
            if kind in slots:
                tier, slot = slots[kind]
                flats[kind] = tier.fetch(slot)
            else:
                flats[kind] = _on_host(state[kind]) if slots else state[kind]
        return flats

    def _to_sleep(self, bucket: Bucket, flats: Mapping[str, Tensor], changes: Collection[str]) -> None:
        state, slots = self._kept[bucket].state, self._slots(bucket, flats)
        for kind, flat in flats.items():
            if kind in slots:
                tier, slot = slots[kind]
                tier.put(slot, flat) if kind in changes else tier.drop(slot, flat)
            elif kind in changes and flat is not state[kind]:
                state[kind].copy_(flat)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to(_HOST)


def _lead(first: int, dtype: torch.dtype) -> int:
    """Bytes behind an aligned address of a part of an aligned buffer."""
    return first * dtype.itemsize % ALIGNMENT
