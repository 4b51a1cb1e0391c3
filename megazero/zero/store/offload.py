"""`OffloadStore`: keeps state in the host's memory or on disk, and has it updated on the host."""

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
from megazero.zero.store.store import GRADIENT, WEIGHT, LoadedBucket, Sizes, Store, add_up, held_as
from megazero.zero.store.tier import ALIGNMENT, Tier, TierSlot

_HOST = torch.device("cpu")
_AHEAD = 1  # buckets whose state is read while one is worked on


@dataclass(frozen=True)
class StatePlacement:
    """The places of a store's state; None is the device.

    Attributes:
        state: the tier of masters and moments.
        gradients: the tier of gradient sums, of buckets whose masters and moments are in a tier too.
        parameters: the tier of the slices of weights that ZeRO stage 3 shards.
        fraction: the share of the elements whose masters and moments are in `state`; the rest stays on the
            device, in whole buckets (twin-flow of ZeRO-Offload++).
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


class OffloadStore(Store):
    """Keeps state in the tiers that a placement names, and brings it to the host bucket by bucket.

    State that is in a tier is updated on the host (ZeRO-Offload, Ren et al. 2021); while one bucket is
    worked on, the next one is read and the last one written (ZeRO-Infinity, Rajbhandari et al. 2021). The
    first buckets of an update are read during the backward before it, into buffers that the last one left.
    Sums and norms round exactly as in `DeviceStore`.

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
            kept, source = _Kept(self._put_away(self.placement.parameters, own, 0), None), own
        else:
            shard = own.clone() if layout.row.shard_params else own
            source = shard if layout.row.shard_state else full
            kept = _Kept(shard, source)
        if bucket.key.trainable:
            self._admit_state(bucket, kept, source)
        else:
            kept.state[WEIGHT] = kept.shard if kept.weights is None else kept.weights
        self.buckets.append(bucket)
        self._kept[bucket] = kept
        self._note_offloaded(bucket)

    def make_moments(
        self, init_state: Callable[[Bucket, Tensor], dict[str, Tensor]], buckets: Sequence[Bucket]
    ) -> None:
        for bucket in buckets:
            state = self._kept[bucket].state
            for loaded_buckets in self.stream((WEIGHT,), [bucket]):
                made = init_state(bucket, loaded_buckets[0].flats[WEIGHT].float())
            if isinstance(state[WEIGHT], TierSlot):
                tier = _of_slot(self.placement.state)
                state.update({kind: self._put_away(tier, flat, 0) for kind, flat in made.items()})
            else:
                state.update(made)
            self._note_offloaded(bucket)

    def read_ahead(self, buckets: Sequence[Bucket]) -> None:
        tier, slots = self.placement.parameters, [self._kept[bucket].shard for bucket in buckets]
        if tier is None:
            return
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
        tier = _of_slot(self.placement.parameters)
        content = tier.fetch(shard)
        self._ahead.discard(shard)
        on_device = content.to(bucket.full.device, copy=not tier.in_place)
        tier.drop(shard, content)
        return on_device

    def open_weights(self, bucket: Bucket) -> Tensor | None:
        kept = self._kept[bucket]
        master, weights = kept.state[WEIGHT], kept.weights
        if master is kept.shard or master is weights:
            return None
        if weights is None:
            return _of_slot(self.placement.parameters).blank(_slot(kept.shard))
        if isinstance(master, TierSlot) and weights.device.type not in ("cpu", "meta"):
            pin = _of_slot(self.placement.state).pin
            return torch.empty(weights.shape, dtype=weights.dtype, pin_memory=pin)
        return weights

    def close_weights(self, bucket: Bucket, weights: Tensor) -> None:
        kept = self._kept[bucket]
        if kept.weights is None:
            _of_slot(self.placement.parameters).put(_slot(kept.shard), weights)
        elif weights is not kept.weights:
            kept.weights.copy_(weights, non_blocking=True)

    def adopt(self, bucket: Bucket) -> None:
        self._finish(bucket)
        kept, layout = self._kept[bucket], bucket.layout
        own = bucket.full[layout.own]
        if isinstance(kept.shard, TierSlot):
            self._fill(_of_slot(self.placement.parameters), kept.shard, own)
        elif layout.row.shard_params:
            kept.shard.copy_(own)
        master, weights = kept.state[WEIGHT], own if kept.weights is None else kept.weights
        if master is kept.shard:
            return
        if isinstance(master, TierSlot):
            self._fill(_of_slot(self.placement.state), master, weights)
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
        tier = _of_slot(self.placement.gradients)
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
        bucket.wait()
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
            if WEIGHT in kinds:
                bucket.wait()
            self._finish(bucket)
            visited = self._fetch(bucket, kinds)
            try:
                yield [LoadedBucket(bucket, visited)]
            finally:  # a visitor may have seen enough
                self._put_back(bucket, visited, changes)

    def sizes(self) -> Sizes:
        items = [item for bucket in self.buckets for item in self._items(bucket)]
        buffers = [("cpu", "buffers", tier.buffer_bytes) for tier in self.placement.tiers]
        return add_up([*items, *(item for item in buffers if item[2])])

    def _read_for_update(self) -> None:
        """Start to read the offloaded masters and moments of the buckets that the step updates first."""
        updated = (bucket for bucket in self.buckets if bucket.key.trainable and self.offloaded[bucket])
        for bucket in islice(updated, 1 + _AHEAD):
            self._prefetch(bucket, self.offloaded[bucket])

    def _finish(self, bucket: Bucket) -> None:
        """Wait for the bucket's update."""
        update = self.updates.pop(bucket, None)
        if update is not None:
            update.result()

    def _note_offloaded(self, bucket: Bucket) -> None:
        state = self._kept[bucket].state
        self.offloaded[bucket] = {
            k for k, held in state.items() if isinstance(held, TierSlot) and k != GRADIENT
        }

    def _items(self, bucket: Bucket) -> Iterator[tuple[str, str, int]]:
        kept = self._kept[bucket]
        weights = kept.shard if bucket.layout.row.shard_params else bucket.full
        place = _of_slot(self.placement.parameters).name if isinstance(weights, TierSlot) else "device"
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
            tier = _of_slot(self.placement.state)
            state[WEIGHT] = self._put_away(tier, weights.to(policy.main_dtype), lead)
        elif kept.weights is None:
            state[WEIGHT] = weights.to(policy.main_dtype, copy=True)
        else:
            state[WEIGHT] = kept.weights.to(policy.main_dtype, copy=policy.own_masters)
        self._admit_sums(bucket, kept, weights.numel())

    def _admit_sums(self, bucket: Bucket, kept: _Kept, numel: int) -> None:
        """Give a trained bucket, which has its masters, gradient sums; `state_range` has `numel` elements."""
        layout, state = bucket.layout, kept.state
        dtype, sharded = self.policy.accumulation_dtype, layout.row.shard_grads
        if self.placement.gradients is None or not isinstance(state[WEIGHT], TierSlot):
            size = layout.shard_size if sharded else layout.padded
            kept.sums = bucket.full.new_zeros(size, dtype=dtype)
            state[GRADIENT] = own_sums(layout, kept.sums)
            return
        lead = 0
        if not sharded:
            kept.sums = bucket.full.new_zeros(layout.padded, dtype=dtype)
            lead = _lead(layout.state_range.start, dtype)
        state[GRADIENT] = self.placement.gradients.make(numel, dtype, lead)

    def _offloads(self, bucket: Bucket) -> bool:
        """Whether the masters and moments of a bucket, counted in `_elements` already, go to the tier.

        All ranks that hold copies of a parameter must answer alike. Replicas and slices have the same buckets
        in the same order. Pipeline stages do not, so the fraction alone decides for parameters that two of
        them hold, and the other buckets make up for it.
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
            return _of_slot(self.placement.gradients)
        whole_shard = kept.state[kind] is kept.shard
        return _of_slot(self.placement.parameters if whole_shard else self.placement.state)

    def _slots(self, bucket: Bucket, kinds: Collection[str]) -> dict[str, tuple[Tier, TierSlot]]:
        kept = self._kept[bucket]
        held = {kind: kept.state[kind] for kind in kinds if kind in kept.state}
        return {kind: (self._tier_of(kept, kind), s) for kind, s in held.items() if isinstance(s, TierSlot)}

    def _prefetch(self, bucket: Bucket, kinds: Collection[str]) -> None:
        for tier, slot in self._slots(bucket, kinds).values():
            tier.prefetch(slot)

    def _fetch(self, bucket: Bucket, kinds: Collection[str]) -> dict[str, Tensor]:
        """All kinds of a bucket on one device: on the host if any of them is kept there."""
        kept, slots = self._kept[bucket], self._slots(bucket, kinds)
        flats = {}
        for kind in (kind for kind in kinds if kind in kept.state):
            held = kept.state[kind]
            if isinstance(held, TierSlot):
                flats[kind] = self._tier_of(kept, kind).fetch(held)
            else:
                flats[kind] = _on_host(held) if slots else held
        return flats

    def _put_back(self, bucket: Bucket, flats: Mapping[str, Tensor], changes: Collection[str]) -> None:
        kept = self._kept[bucket]
        for kind, flat in flats.items():
            held = kept.state[kind]
            if isinstance(held, TierSlot):
                tier = self._tier_of(kept, kind)
                tier.put(held, flat) if kind in changes else tier.drop(held, flat)
            elif kind in changes and flat is not held:
                held.copy_(flat)


def _of_slot(tier: Tier | None) -> Tier:
    assert tier is not None, "a slot belongs to a tier"
    return tier


def _slot(shard: Tensor | TierSlot) -> TierSlot:
    assert isinstance(shard, TierSlot), "without weights on the device, their slice is in a slot"
    return shard


def _on_host(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to(_HOST)


def _lead(first: int, dtype: torch.dtype) -> int:
    """Bytes from an aligned address to element `first` of an aligned buffer."""
    return first * dtype.itemsize % ALIGNMENT
