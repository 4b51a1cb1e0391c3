"""`DeviceStore`: everything stays on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.zero.bucket import Bucket
from megazero.zero.layout import own_sums
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.kept import same_place
from megazero.zero.store.store import GRADIENT, WEIGHT, LoadedBucket, Sizes, Store, add_up, held_as
from megazero.zero.store.tier import Tier


@dataclass(frozen=True)
class _Held:
    """The tensors that a device store holds for a bucket.

    Attributes:
        shard: this rank's slice of the weights.
        weights: the weights over `state_range`.
        state: masters and moments by kind.
        sums: gradient sums, [padded], or [shard_size] if sharded; None if the parameters are not trained.
        own_sums: the sums over `state_range`, by kind.
    """

    shard: Tensor
    weights: Tensor
    state: dict[str, Tensor]
    sums: Tensor | None
    own_sums: Mapping[str, Tensor]


class DeviceStore(Store):
    """Keeps everything on the device, so a visit moves nothing and yields all buckets at once.

    Weights of the master dtype are their own masters.

    Args:
        policy: the dtypes of masters and sums.
    """

    def __init__(self, policy: ZeroPolicy):
        self.policy = policy
        self.buckets: list[Bucket] = []
        self.tiers: tuple[Tier, ...] = ()
        self.offloaded: dict[Bucket, set[str]] = {}
        self._held: dict[Bucket, _Held] = {}

    def admit(self, bucket: Bucket) -> None:
        layout, full = bucket.layout, bucket.full
        shard = full[layout.own].clone() if layout.row.shard_params else full[layout.own]
        weights = shard if layout.row.shard_state else full
        master, sums, own = weights, None, {}
        if bucket.key.trainable:
            master = weights.to(self.policy.dtypes.main, copy=self.policy.needs.in_use)
            size = layout.shard_size if layout.row.shard_grads else layout.padded
            sums = full.new_zeros(size, dtype=self.policy.dtypes.accumulation)
            own = {GRADIENT: own_sums(layout, sums)}
        self.buckets.append(bucket)
        self._held[bucket] = _Held(shard, weights, {WEIGHT: master}, sums, own)

    def make_moments(
        self, init_state: Callable[[Bucket, Tensor], dict[str, Tensor]], buckets: Sequence[Bucket]
    ) -> None:
        for bucket in buckets:
            state = self._held[bucket].state
            state.update(init_state(bucket, state[WEIGHT].float()))

    def read_ahead(self, buckets: Sequence[Bucket]) -> None:
        return None  # it is here

    def shard(self, bucket: Bucket) -> Tensor:
        return self._held[bucket].shard

    def open_weights(self, bucket: Bucket) -> Tensor | None:
        held = self._held[bucket]
        return None if held.state[WEIGHT] is held.weights else held.weights

    def close_weights(self, bucket: Bucket, weights: Tensor) -> None:
        return None  # they were written where they are kept

    def adopt(self, bucket: Bucket) -> None:
        held, layout = self._held[bucket], bucket.layout
        if layout.row.shard_params:
            held.shard.copy_(bucket.full[layout.own])
        if held.state[WEIGHT] is not held.weights:
            held.state[WEIGHT].copy_(held.weights)

    def sums(self, bucket: Bucket) -> Tensor:
        sums = self._held[bucket].sums
        assert sums is not None, "a frozen bucket has no gradients"
        return sums

    @torch.no_grad()
    def accumulate(self, bucket: Bucket, result: Tensor, *, first: bool) -> None:
        sums = self._held[bucket].own_sums[GRADIENT]
        if same_place(result, sums):  # they were reduced in place
            return
        sums.copy_(result) if first else sums.add_(result)

    def sizes(self) -> Sizes:
        return add_up(item for bucket in self.buckets for item in self._items(bucket))

    def at_rest(self, bucket: Bucket) -> Mapping[str, Tensor]:
        bucket.wait()
        return self._held[bucket].state

    def _items(self, bucket: Bucket) -> Iterator[tuple[str, str, int]]:
        held = self._held[bucket]
        weights = held.shard if bucket.layout.row.shard_params else bucket.full
        yield "device", "weights", weights.nbytes
        for kind, flat in held.state.items():
            if flat is not held.weights:
                yield "device", held_as(kind), flat.nbytes
        if held.sums is not None:
            yield "device", "gradients", held.sums.nbytes

    def stream(
        self, kinds: Collection[str], buckets: Sequence[Bucket], changes: Collection[str] = ()
    ) -> Iterator[Sequence[LoadedBucket]]:
        everything = []
        for bucket in buckets:
            if WEIGHT in kinds:
                bucket.wait()
            held = self._held[bucket]
            flats = {**held.state, **held.own_sums}
            everything.append(LoadedBucket(bucket, {kind: flats[kind] for kind in kinds if kind in flats}))
        if everything:
            yield everything
