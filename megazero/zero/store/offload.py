"""`OffloadStore`: keeps state in the host's memory or on disk, and has it updated on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from megazero.mpu.streams import INLINE, REACHED, Point, Streams
from megazero.zero.bucket import Bucket
from megazero.zero.layout import own_sums
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.kept import Kept, lead_of, of_slot, same_place, slot_of
from megazero.zero.store.slices import Slices
from megazero.zero.store.store import GRADIENT, WEIGHT, LoadedBucket, Sizes, Store, add_up, held_as
from megazero.zero.store.tier import Tier, TierSlot
from megazero.zero.store.transfers import PendingWrite, Transfers

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


class OffloadStore(Store):
    """Keeps state in the tiers that a placement names, and brings it to the host bucket by bucket.

    State that is in a tier is updated on the host (ZeRO-Offload, Ren et al. 2021); while one bucket is
    worked on, the next one is read and the last one written (ZeRO-Infinity, Rajbhandari et al. 2021). The
    first buckets of an update are read during the backward before it, into buffers that the last one left.
    Sums and norms round exactly as in `DeviceStore`.

    Where the device's memory is apart, `Transfers` copy beside what the device computes: sums go to the host
    while backward goes on, new weights come back while the next bucket is updated, and slices that are read
    ahead go on to the device.

    Args:
        policy: the dtypes of masters and sums.
        placement: what is kept where.
        streams: those of the device.

    Attributes:
        updates: updates of buckets that run on another thread; whatever touches their state waits for them.
    """

    def __init__(self, policy: ZeroPolicy, placement: StatePlacement, streams: Streams = INLINE):
        self.policy = policy
        self.placement = placement
        self.buckets: list[Bucket] = []
        self.tiers = placement.tiers
        self.offloaded: dict[Bucket, set[str]] = {}
        self._kept: dict[Bucket, Kept] = {}
        self.updates: dict[Bucket, Future[None]] = {}
        self._elements = self._offloaded = 0
        self._transfers = Transfers(streams)
        self._slices = None if placement.parameters is None else Slices(placement.parameters, self._transfers)
        self._on_host: dict[tuple[Bucket, str], tuple[Tensor, Point]] = {}  # for the visits that come next
        self._leaving: dict[Bucket, Point] = {}  # copies that read the device's sums

    def admit(self, bucket: Bucket) -> None:
        layout, full = bucket.layout, bucket.full
        own = full[layout.own]
        if layout.row.shard_params and self.placement.parameters is not None:
            kept, source = Kept(self._put_away(self.placement.parameters, own, 0), None), own
        else:
            shard = own.clone() if layout.row.shard_params else own
            source = shard if layout.row.shard_state else full
            kept = Kept(shard, source)
        if bucket.key.trainable:
            self._admit_state(bucket, kept, source)
        else:
            kept.state[WEIGHT] = kept.shard if kept.weights is None else kept.weights
        self.buckets.append(bucket)
        self._kept[bucket] = kept
        dtypes = (self.policy.dtypes.main, self.policy.dtypes.accumulation, own.dtype)
        self._transfers.expect(source.numel() * max(dtype.itemsize for dtype in dtypes))
        self._note_offloaded(bucket)

    def make_moments(
        self, init_state: Callable[[Bucket, Tensor], dict[str, Tensor]], buckets: Sequence[Bucket]
    ) -> None:
        for bucket in buckets:
            state = self._kept[bucket].state
            for loaded_buckets in self.stream((WEIGHT,), [bucket]):
                made = init_state(bucket, loaded_buckets[0].flats[WEIGHT].float())
            if isinstance(state[WEIGHT], TierSlot):
                tier = of_slot(self.placement.state)
                state.update({kind: self._put_away(tier, flat, 0) for kind, flat in made.items()})
            else:
                state.update(made)
            self._note_offloaded(bucket)

    def read_ahead(self, buckets: Sequence[Bucket]) -> None:
        slots = [shard for bucket in buckets if isinstance(shard := self._kept[bucket].shard, TierSlot)]
        if self._slices is not None:
            self._slices.read_ahead(slots, self.buckets[0].full.device)

    def shard(self, bucket: Bucket) -> Tensor:
        shard = self._kept[bucket].shard
        if not isinstance(shard, TierSlot):
            return shard
        assert self._slices is not None, "a slot belongs to a tier"
        return self._slices.take(shard, bucket.full.device)

    def open_weights(self, bucket: Bucket) -> Tensor | None:
        kept = self._kept[bucket]
        master, weights = kept.state[WEIGHT], kept.weights
        if master is kept.shard or master is weights:
            return None
        if weights is None:
            shard = slot_of(kept.shard)
            if self._transfers.apart and isinstance(master, Tensor):
                return self._transfers.outgoing(master, shard.dtype)
            self._transfers.settle(shard)
            return of_slot(self.placement.parameters).blank(shard)
        if self._transfers.apart and isinstance(master, TierSlot):
            return self._transfers.weights_buffer(weights)
        return weights

    def close_weights(self, bucket: Bucket, weights: Tensor) -> None:
        kept = self._kept[bucket]
        if kept.weights is None:
            tier, shard = of_slot(self.placement.parameters), slot_of(kept.shard)
            if self._transfers.apart and isinstance(kept.state[WEIGHT], Tensor):
                self._transfers.settle(shard)
                target = tier.blank(shard)
                point = self._transfers.outgoing_to_host(target, weights)
                self._transfers.write(PendingWrite(tier, shard, target, target, point))
            else:
                tier.put(shard, weights)
        elif weights is not kept.weights:
            self._transfers.weights_to_device(weights, kept.weights)

    def adopt(self, bucket: Bucket) -> None:
        self._finish(bucket)
        kept, layout = self._kept[bucket], bucket.layout
        own = bucket.full[layout.own]
        if isinstance(kept.shard, TierSlot):
            self._fill(of_slot(self.placement.parameters), kept.shard, own)
        elif layout.row.shard_params:
            kept.shard.copy_(own)
        master, weights = kept.state[WEIGHT], own if kept.weights is None else kept.weights
        if master is kept.shard:
            return
        if isinstance(master, TierSlot):
            self._fill(of_slot(self.placement.state), master, weights)
        elif master is not weights:
            master.copy_(weights)

    def sums(self, bucket: Bucket) -> Tensor:
        sums = self._kept[bucket].sums
        assert sums is not None, "a frozen bucket has no gradients"
        self._leaving.pop(bucket, REACHED).compute_waits()
        return sums

    @torch.no_grad()
    def accumulate(self, bucket: Bucket, result: Tensor, *, first: bool) -> None:
        self._finish(bucket)
        self._read_for_update()
        sums = self._kept[bucket].state[GRADIENT]
        if not isinstance(sums, TierSlot):
            if not same_place(result, sums):  # otherwise they were reduced in place
                sums.copy_(result) if first else sums.add_(result)
            return
        tier, on_device = of_slot(self.placement.gradients), self._kept[bucket].sums
        lasting = on_device is not None and same_place(result, on_device[bucket.layout.state_range])
        self._transfers.settle(sums)
        if first:
            target = tier.blank(sums)
            arriving, point = target, self._transfers.to_host(result, target, lasting=lasting)
        else:
            target = None
            tier.prefetch(sums)
            at = self.buckets.index(bucket)
            for other in self.buckets[at + 1 : at + 1 + _AHEAD]:
                self._prefetch(other, (GRADIENT,))
            arriving, point = self._transfers.sums_to_host(result, lasting=lasting)
        if lasting:
            self._leaving[bucket] = point
        self._transfers.write(PendingWrite(tier, sums, target, arriving, point))

    def at_rest(self, bucket: Bucket) -> Mapping[str, Tensor]:
        bucket.wait()
        self._finish(bucket)
        kept, rest = self._kept[bucket], {}
        for kind, held in kept.state.items():
            if isinstance(held, TierSlot) and kind != GRADIENT:
                self._transfers.settle(held)
                rest[kind] = self._tier_of(kept, kind).at_rest(held)
            elif isinstance(held, Tensor) and kind != GRADIENT:
                rest[kind] = held
        return rest

    @torch.no_grad()
    def stream(
        self, kinds: Collection[str], buckets: Sequence[Bucket], changes: Collection[str] = ()
    ) -> Iterator[Sequence[LoadedBucket]]:
        try:
            for number, bucket in enumerate(buckets):
                for other in buckets[number : number + 1 + _AHEAD]:
                    if WEIGHT in kinds:
                        other.wait()
                    self._prefetch(other, kinds)
                    self._lower(other, kinds)
                self._finish(bucket)
                visited = self._fetch(bucket, kinds)
                try:
                    yield [LoadedBucket(bucket, visited)]
                finally:  # a visitor may have seen enough
                    self._put_back(bucket, visited, changes)
        finally:
            self._on_host.clear()

    def sizes(self) -> Sizes:
        items = [item for bucket in self.buckets for item in self._items(bucket)]
        on_device, on_host = self._transfers.buffer_bytes
        slices = 0 if self._slices is None else self._slices.most_bytes
        buffers = [("cpu", "buffers", tier.buffer_bytes) for tier in self.placement.tiers]
        buffers += [("device", "buffers", on_device + slices), ("cpu", "buffers", on_host)]
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
        place = of_slot(self.placement.parameters).name if isinstance(weights, TierSlot) else "device"
        yield place, "weights", weights.nbytes
        for kind, held in kept.state.items():
            if isinstance(held, TierSlot):
                if held is not kept.shard:
                    yield self._tier_of(kept, kind).name, held_as(kind), held.nbytes
            elif kind != GRADIENT and held is not kept.weights and held is not kept.shard:
                yield "device", held_as(kind), held.nbytes
        if kept.sums is not None:
            yield "device", "gradients", kept.sums.nbytes

    def _admit_state(self, bucket: Bucket, kept: Kept, weights: Tensor) -> None:
        """Give a trained bucket masters and gradient sums."""
        layout, policy, state = bucket.layout, self.policy, kept.state
        self._elements += layout.padded
        if self._offloads(bucket):
            self._offloaded += layout.padded
            lead = 0
            if not layout.row.shard_params and policy.dtypes.main == bucket.key.dtype:
                lead = lead_of(layout.state_range.start, policy.dtypes.main)
            tier = of_slot(self.placement.state)
            state[WEIGHT] = self._put_away(tier, weights.to(policy.dtypes.main), lead)
        elif kept.weights is None:
            state[WEIGHT] = weights.to(policy.dtypes.main, copy=True)
        else:
            state[WEIGHT] = kept.weights.to(policy.dtypes.main, copy=policy.needs.in_use)
        self._admit_sums(bucket, kept, weights.numel())

    def _admit_sums(self, bucket: Bucket, kept: Kept, numel: int) -> None:
        """Give a trained bucket, which has its masters, gradient sums; `state_range` has `numel` elements."""
        layout, state = bucket.layout, kept.state
        dtype, sharded = self.policy.dtypes.accumulation, layout.row.shard_grads
        if self.placement.gradients is None or not isinstance(state[WEIGHT], TierSlot):
            size = layout.shard_size if sharded else layout.padded
            kept.sums = bucket.full.new_zeros(size, dtype=dtype)
            state[GRADIENT] = own_sums(layout, kept.sums)
            return
        lead = 0
        if not sharded:
            kept.sums = bucket.full.new_zeros(layout.padded, dtype=dtype)
            lead = lead_of(layout.state_range.start, dtype)
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
        self._transfers.settle(slot)
        there = tier.blank(slot)
        there.copy_(content)
        tier.put(slot, there)

    def _tier_of(self, kept: Kept, kind: str) -> Tier:
        if kind == GRADIENT:
            return of_slot(self.placement.gradients)
        whole_shard = kept.state[kind] is kept.shard
        return of_slot(self.placement.parameters if whole_shard else self.placement.state)

    def _slots(self, bucket: Bucket, kinds: Collection[str]) -> dict[str, tuple[Tier, TierSlot]]:
        kept = self._kept[bucket]
        held = {kind: kept.state[kind] for kind in kinds if kind in kept.state}
        return {kind: (self._tier_of(kept, kind), s) for kind, s in held.items() if isinstance(s, TierSlot)}

    def _prefetch(self, bucket: Bucket, kinds: Collection[str]) -> None:
        for tier, slot in self._slots(bucket, kinds).values():
            self._transfers.settle(slot)
            tier.prefetch(slot)

    def _lower(self, bucket: Bucket, kinds: Collection[str]) -> None:
        """Start to copy to the host what a visit needs there and the device keeps: gradient sums."""
        if not self._slots(bucket, kinds):
            return
        for kind in kinds:
            held = self._kept[bucket].state.get(kind)
            if isinstance(held, Tensor) and (bucket, kind) not in self._on_host:
                self._on_host[bucket, kind] = self._transfers.sums_to_host(held, lasting=True)
                if self._transfers.apart:
                    self._leaving[bucket] = self._on_host[bucket, kind][1]

    def _fetch(self, bucket: Bucket, kinds: Collection[str]) -> dict[str, Tensor]:
        """All kinds of a bucket on one device: on the host if any of them is kept there."""
        kept, slots = self._kept[bucket], self._slots(bucket, kinds)
        flats = {}
        for kind in (kind for kind in kinds if kind in kept.state):
            held = kept.state[kind]
            if isinstance(held, TierSlot):
                self._transfers.settle(held)
                flats[kind] = self._tier_of(kept, kind).fetch(held)
            elif slots:
                flats[kind], point = self._on_host.pop((bucket, kind))
                point.host_waits()
            else:
                flats[kind] = held
        return flats

    def _put_back(self, bucket: Bucket, flats: Mapping[str, Tensor], changes: Collection[str]) -> None:
        kept = self._kept[bucket]
        for kind, flat in flats.items():
            held = kept.state[kind]
            if isinstance(held, TierSlot):
                tier = self._tier_of(kept, kind)
                tier.put(held, flat) if kind in changes else tier.drop(held, flat)
            elif kind in changes and flat is not held:
                held.copy_(flat)  # the host waits for it: few rules change what the device keeps
