"""Sharded weights are gathered for each use and freed after it (stage 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megazero.zero.bucket import Bucket, Presence
from megazero.zero.policy import ZeroPolicy
from megazero.zero.unit import Unit


class Gatherer:
    """Gathers each unit's weights before its forward and its backward, and those of following units ahead.

    Hooks do it: before a unit's module runs, after it has, and when a gradient reaches one of its outputs.
    Which unit follows which is learned from the last time, separately for forward and backward; what comes
    unforeseen is gathered on demand. Every rank runs the same units in the same order.

    After forward a unit's weights are freed, and in backward as soon as all their gradients have been
    collected, unless the policy has room to keep them for the next use. Nothing is freed by forwards within
    a backward: there they recompute what the backward is about to need.

    Args:
        units: in the order in which forward uses them.
        buckets: of the units' parameters; those whose weights are whole need nothing.
        policy: what is gathered ahead and what is kept.
    """

    def __init__(self, units: Sequence[Unit], buckets: Sequence[Bucket], policy: ZeroPolicy):
        self.policy = policy
        self.buckets = [bucket for bucket in buckets if bucket.row.shard_params]
        self._bucket_of = {id(param): bucket for bucket in self.buckets for param in bucket.params}
        self._units: list[list[Bucket]] = []
        self._chunks: dict[int, list[int]] = {}
        self._live = 0
        self._users = dict.fromkeys(map(id, self.buckets), 0)
        self._missing: dict[int, set[int]] = {}
        self._backward = False
        self._follower: dict[tuple[bool, int], int] = {}
        self._previous: int | None = None
        for unit in units:
            mine = self.of(unit.params)
            if mine:
                self._hook(unit.module, len(self._units))
                self._chunks.setdefault(unit.chunk, []).append(len(self._units))
                self._units.append(mine)

    def of(self, params: Iterable[nn.Parameter]) -> list[Bucket]:
        """The buckets that hold `params`, of those whose weights are sharded."""
        found = {id(p): self._bucket_of[id(p)] for p in params if id(p) in self._bucket_of}
        return list({id(bucket): bucket for bucket in found.values()}.values())

    def hint(self, chunk: int, *, backward: bool) -> None:
        """The chunk runs next: start gathering what it uses first."""
        units = self._chunks.get(chunk)
        self._previous = None
        if units and self.policy.overlap_gather:
            self._prefetch(units[-1] if backward else units[0], backward)

    def begin_backward(self, chunk: int) -> None:
        """A backward of the chunk begins."""
        self._backward, self._previous = True, None
        self._missing = {id(b): {id(p) for p in b.params} for b in self._buckets_of(chunk)}

    def collected(self, param: nn.Parameter) -> None:
        """The parameter's gradient is complete; its weights may have served."""
        bucket = self._bucket_of.get(id(param))
        if bucket is None:
            return
        missing = self._missing.get(id(bucket))
        if missing is None:
            return  # of another chunk, to which it is tied
        missing.discard(id(param))
        if not missing:
            self._drop(bucket)

    def end_backward(self, chunk: int) -> None:
        """The backward is over."""
        self._backward = False
        self.release(chunk)

    def release(self, chunk: int) -> None:
        """Free the chunk's weights that the policy does not keep."""
        self._previous = None
        for bucket in self._buckets_of(chunk):
            self._drop(bucket)

    def finish(self) -> None:
        """Free everything."""
        self._backward, self._previous = False, None
        self._users = dict.fromkeys(self._users, 0)
        for bucket in self.buckets:
            self.free(bucket)

    def fetch(self, bucket: Bucket) -> None:
        """Start gathering a bucket."""
        if bucket.presence is Presence.SHARD:
            bucket.fetch()
            self._live += bucket.padded

    def free(self, bucket: Bucket) -> None:
        """Free a bucket's whole weights."""
        if bucket.presence is not Presence.SHARD:
            bucket.free()
            self._live -= bucket.padded

    def _buckets_of(self, chunk: int) -> list[Bucket]:
        return [bucket for unit in self._chunks.get(chunk, []) for bucket in self._units[unit]]

    def _drop(self, bucket: Bucket) -> None:
        if self._live > self.policy.max_live and not self._users[id(bucket)]:
            self.free(bucket)

    def _hook(self, module: nn.Module, unit: int) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self._use(unit)
            if not self._backward:
                for bucket in self._units[unit]:
                    self._users[id(bucket)] += 1

        def on_gradient(grad: Tensor) -> None:
            self._use(unit)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            outputs = list(_tensors(output))
            for tensor in outputs:
                if tensor.grad_fn is not None:
                    tensor.register_hook(on_gradient)
            if not self._backward:
                self._leave(unit, outputs)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _leave(self, unit: int, outputs: Sequence[Tensor]) -> None:
        """A forward of the unit is over."""
        handed_out = [tensor.untyped_storage() for tensor in outputs if tensor.layout is torch.strided]
        for bucket in self._units[unit]:
            self._users[id(bucket)] -= 1
            # A layer may return a bias for its caller to add; that stays until the chunk is released.
            if not any(storage is bucket.storage for storage in handed_out):
                self._drop(bucket)

    def _use(self, unit: int) -> None:
        """Return when the unit's weights are whole, with those of its followers under way."""
        absent = [b for b in self._units[unit] if b.presence is not Presence.WHOLE]
        if not absent:
            return
        for bucket in absent:
            self.fetch(bucket)
        if self._previous is not None:
            self._follower[self._backward, self._previous] = unit
        self._previous = unit
        follower = self._follower.get((self._backward, unit))
        if follower is not None and self.policy.overlap_gather:
            self._prefetch(follower, self._backward)
        for bucket in absent:
            bucket.arrive()

    def _prefetch(self, unit: int | None, backward: bool) -> None:
        """Start gathering `unit` and those that follow it, as far as the policy allows."""
        room, seen = self.policy.prefetch, set()
        while unit is not None and unit not in seen:
            seen.add(unit)
            ahead = [b for b in self._units[unit] if b.presence is not Presence.WHOLE]
            room -= sum(b.padded for b in ahead)
            if room < 0:
                return
            for bucket in ahead:
                self.fetch(bucket)
            unit = self._follower.get((backward, unit))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in what a module returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from _tensors(getattr(value, each.name))
