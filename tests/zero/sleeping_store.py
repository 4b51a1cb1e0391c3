"""A store that keeps everything in other memory and has little of it awake at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megazero.zero.bucket import Bucket
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.host import HostTier
from megazero.zero.store.store import GRADIENT, WEIGHT, LoadedBucket, Sizes


class SleepingStore:
    """Visits bucket after bucket, with the next one read ahead. What sleeps reads as NaN where it was awake.

    Only what a visit says that it changes is put back.
    """

    def __init__(self, policy: ZeroPolicy):
        self.policy = policy
        self.buckets: list[Bucket] = []
        self.tiers = (HostTier(),)  # what is asleep is elsewhere
        self.offloaded: dict[Bucket, dict[str, Tensor]] = {}
        self._shards: dict[Bucket, Tensor] = {}
        self._sums: dict[Bucket, Tensor] = {}

    def admit(self, bucket: Bucket) -> None:
        layout, policy = bucket.layout, self.policy
        own = bucket.full[layout.own]
        self._shards[bucket] = own.clone() if layout.row.shard_params else own
        weights = self._weights(bucket)
        self.offloaded[bucket] = {WEIGHT: weights.clone()}
        if bucket.key.trainable:
            sums = torch.full((layout.padded,), torch.nan, dtype=policy.dtypes.accumulation)
            self.offloaded[bucket] = {
                WEIGHT: weights.to(policy.dtypes.main, copy=True),
                GRADIENT: torch.zeros(weights.numel(), dtype=policy.dtypes.accumulation),
            }
            if not layout.row.shard_grads:
                self._sums[bucket] = sums
        self.buckets.append(bucket)

    def make_moments(
        self, init_state: Callable[[Bucket, Tensor], dict[str, Tensor]], buckets: Sequence[Bucket]
    ) -> None:
        for bucket in buckets:
            self.offloaded[bucket].update(init_state(bucket, self.offloaded[bucket][WEIGHT].float()))

    def read_ahead(self, buckets: Sequence[Bucket]) -> None:
        return None

    def shard(self, bucket: Bucket) -> Tensor:
        shard = self._shards[bucket]
        return shard.clone() if bucket.layout.row.shard_params else shard

    def open_weights(self, bucket: Bucket) -> Tensor:
        return torch.full_like(self._weights(bucket), torch.nan)

    def close_weights(self, bucket: Bucket, weights: Tensor) -> None:
        self._weights(bucket).copy_(weights)

    def adopt(self, bucket: Bucket) -> None:
        if bucket.layout.row.shard_params:
            self._shards[bucket].copy_(bucket.full[bucket.layout.own])
        self.offloaded[bucket][WEIGHT].copy_(self._weights(bucket))

    def sums(self, bucket: Bucket) -> Tensor:
        return self._sums[bucket]

    @torch.no_grad()
    def accumulate(self, bucket: Bucket, result: Tensor, *, first: bool) -> None:
        sums = self.offloaded[bucket][GRADIENT]
        sums.copy_(result) if first else sums.add_(result)
        if bucket in self._sums:
            self._sums[bucket].fill_(torch.nan)

    def sizes(self) -> Sizes:
        return {}

    def at_rest(self, bucket: Bucket) -> Mapping[str, Tensor]:
        return {kind: flat for kind, flat in self.offloaded[bucket].items() if kind != GRADIENT}

    def stream(
        self, kinds: Collection[str], buckets: Sequence[Bucket], changes: Collection[str] = ()
    ) -> Iterator[Sequence[LoadedBucket]]:
        ahead = [self._wake(bucket, kinds) for bucket in buckets[:1]]
        for number in range(len(buckets)):
            ahead += [self._wake(bucket, kinds) for bucket in buckets[number + 1 : number + 2]]
            loaded = ahead.pop(0)
            yield [loaded]
            for kind, flat in loaded.flats.items():
                if kind in changes:
                    self.offloaded[loaded.bucket][kind].copy_(flat)
                flat.fill_(torch.nan)

    def _wake(self, bucket: Bucket, kinds: Collection[str]) -> LoadedBucket:
        """Copies at the places in memory where the device has them: how a norm rounds depends on that."""
        layout, offloaded = bucket.layout, self.offloaded[bucket]
        own_master = self.policy.dtypes.main != bucket.key.dtype
        apart = {WEIGHT: layout.row.shard_params or own_master, GRADIENT: layout.row.shard_grads}
        flats = {kind: offloaded[kind].clone() for kind in kinds if kind in offloaded}
        for kind, flat in flats.items():
            if not apart.get(kind, True):
                flats[kind] = flat.new_empty(layout.padded)[layout.state_range].copy_(flat)
        return LoadedBucket(bucket, flats)

    def _weights(self, bucket: Bucket) -> Tensor:
        return self._shards[bucket] if bucket.layout.row.shard_state else bucket.full
