"""Gathers sharded weights for each use and frees them afterwards (stage 3).

Weights that stay whole are gathered once, after the update of their shards; here they are waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megazero.zero.bucket import Bucket, ShardedState
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.store import Store
from megazero.zero.unit import Unit

SLICES_AHEAD = 2
"""Buckets whose offloaded slices are read before they are gathered."""


class Gatherer:
    """Gathers each unit's weights before its forward and backward, and the following units' ahead of time.

    Hooks do this: before a unit's module runs, after it has run, and when a gradient reaches one of its
    outputs. The order of the units is learned from the previous pass, separately for forward and backward; a
    unit that was not expected is gathered on demand. Every rank runs the same units in the same order.

    Where slices are offloaded, those of the next `SLICES_AHEAD` buckets beyond the gathered ones are read
    ahead, in the same order, or in the order of the units while that one is not known.

    A unit's weights are freed after its forward, and in backward as soon as all their gradients have been
    collected, unless the policy has room to keep them for the next use. A forward that runs within a backward
    frees nothing: it recomputes what the backward is about to need.

    Weights that stay whole and that an update has gathered anew (`Bucket.late`) are waited for before the
    forward of the first unit that uses them.

    Args:
        units: the units in the order in which forward uses them.
        store: holds the buckets of the units' parameters.
        policy: what is gathered ahead and what is kept.
        late: whether units, rather than the update, wait for the gathers of weights that stay whole.

    Attributes:
        most_live_bytes: the most bytes that gathered weights have held at a time.
        observer: is shown each bucket that is gathered; None for nobody.
    """

    def __init__(self, units: Sequence[Unit], store: Store, policy: ZeroPolicy, *, late: bool = False):
        self.policy = policy
        self.store = store
        self.observer: Callable[[Bucket], None] | None = None
        self.buckets = [bucket for bucket in store.buckets if bucket.layout.row.shard_params]
        self._bucket_of = {id(param): bucket for bucket in self.buckets for param in bucket.params}
        self._units: list[list[Bucket]] = []
        self._chunks: dict[int, list[int]] = {}
        self._live = 0
        self._live_bytes = self.most_live_bytes = 0
        self._users = dict.fromkeys(map(id, self.buckets), 0)
        self._ahead: list[Bucket] = []  # not gathered yet, and their slices are being read
        self._missing: dict[int, set[int]] = {}
        self._backward = False
        self._follower: dict[tuple[bool, int], int] = {}
        self._neighbours: dict[tuple[bool, int], int] = {}
        self._previous: int | None = None
        self._late = [b for b in store.buckets if late and _gathered_after_updates(b)]
        for bucket in self._late:
            bucket.late = True
        for unit in units:
            self._hook_late(unit)
            mine = self.of(unit.params)
            if mine:
                self._hook(unit.module, len(self._units))
                before = self._chunks.setdefault(unit.chunk, [])
                if before:
                    self._neighbours[False, before[-1]] = len(self._units)
                    self._neighbours[True, len(self._units)] = before[-1]
                before.append(len(self._units))
                self._units.append(mine)

    def of(self, params: Iterable[nn.Parameter]) -> list[Bucket]:
        """The buckets with sharded weights that hold any of `params`."""
        buckets = [self._bucket_of[id(p)] for p in params if id(p) in self._bucket_of]
        return list({id(bucket): bucket for bucket in buckets}.values())

    def hint(self, chunk: int, *, backward: bool) -> None:
        """Start gathering the chunk's first units, because it runs next."""
        units = self._chunks.get(chunk)
        # Which chunk comes next is the schedule's matter: its first unit is not the follower of the last one.
        self._previous = None
        if not units:
            return
        first = units[-1] if backward else units[0]
        self._read_ahead(first, backward)
        if self.policy.gathers.overlap:
            self._prefetch(first, backward)
            self._read_ahead(first, backward)  # further on, now that some slices have been used

    def begin_backward(self, chunk: int) -> None:
        """Note that a backward of the chunk begins."""
        self._backward, self._previous = True, None
        self._missing = {id(b): {id(p) for p in b.params} for b in self._buckets_of(chunk)}

    def collected(self, param: nn.Parameter) -> None:
        """Note that the parameter's gradient is complete, so its weights may no longer be needed."""
        bucket = self._bucket_of.get(id(param))
        if bucket is None:
            return
        missing = self._missing.get(id(bucket))
        if missing is None:
            return  # it belongs to another chunk and is tied to this one
        missing.discard(id(param))
        if not missing:
            self._drop(bucket)

    def end_backward(self, chunk: int) -> None:
        """Note that the backward is over, and free the chunk's weights."""
        self._backward = False
        self.release(chunk)

    def release(self, chunk: int) -> None:
        """Free the chunk's weights that the policy does not keep."""
        self._previous = None
        mine = self._buckets_of(chunk)
        # Slices that are read ahead for other chunks stay; this one's would be read in vain.
        self._expect([bucket for bucket in self._ahead if bucket not in mine])
        for bucket in mine:
            self._drop(bucket)

    def finish(self) -> None:
        """Free everything."""
        self._expect([])
        self._backward, self._previous = False, None
        self._users = dict.fromkeys(self._users, 0)
        # Also those that were gathered for a unit that did not run: nobody has waited for them, so `reshard`
        # does, as a gather writes to the storage until it is done.
        for bucket in self.buckets:
            self.reshard(bucket)

    def arrive(self) -> None:
        """Wait for gathers of updated weights that no unit has used, so that the next update may begin."""
        for bucket in self._late:
            bucket.wait()

    def unshard(self, bucket: Bucket) -> None:
        """Start gathering a bucket."""
        if bucket.presence is ShardedState.SHARD:
            bucket.unshard()
            if self.observer is not None:
                self.observer(bucket)
            if bucket in self._ahead:
                self._ahead.remove(bucket)
            self._live += bucket.layout.padded
            self._live_bytes += bucket.full.nbytes
            self.most_live_bytes = max(self.most_live_bytes, self._live_bytes)

    def reshard(self, bucket: Bucket) -> None:
        """Free a bucket's whole weights, if they are sharded."""
        if bucket.layout.row.shard_params and bucket.presence is not ShardedState.SHARD:
            bucket.reshard()
            self._live -= bucket.layout.padded
            self._live_bytes -= bucket.full.nbytes

    @contextmanager
    def held(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """A context in which no forward frees these buckets."""
        for bucket in buckets:
            self._users[id(bucket)] += 1
        try:
            yield
        finally:
            for bucket in buckets:
                self._users[id(bucket)] = max(0, self._users[id(bucket)] - 1)

    def _buckets_of(self, chunk: int) -> list[Bucket]:
        return [bucket for unit in self._chunks.get(chunk, []) for bucket in self._units[unit]]

    def _drop(self, bucket: Bucket) -> None:
        if self._live > self.policy.gathers.max_live and not self._users[id(bucket)]:
            self.reshard(bucket)

    def _hook_late(self, unit: Unit) -> None:
        used = set(map(id, unit.params))
        mine = [bucket for bucket in self._late if any(id(param) in used for param in bucket.params)]

        def before(module: nn.Module, args: object) -> None:
            for bucket in mine:
                bucket.wait()

        if mine:
            unit.module.register_forward_pre_hook(before)

    def _hook(self, module: nn.Module, unit: int) -> None:
        def before(module: nn.Module, args: object) -> None:
            self._use(unit)
            # A module may run within another that uses the same bucket: the inner one's end must not free it.
            # In backward nothing is freed by a forward's end, so nothing is counted.
            if not self._backward:
                for bucket in self._units[unit]:
                    self._users[id(bucket)] += 1

        def on_gradient(grad: Tensor) -> None:
            # Autograd calls this before it runs the functions that saved views of the weights. The storage is
            # filled again under the same tensors, so what was saved is valid then.
            self._use(unit)

        def after(module: nn.Module, args: object, output: object) -> None:
            outputs = list(_tensors(output))
            for tensor in outputs:
                if tensor.grad_fn is not None:
                    tensor.register_hook(on_gradient)
            if not self._backward:
                self._leave(unit, outputs)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _leave(self, unit: int, outputs: Sequence[Tensor]) -> None:
        """Free the unit's weights after a forward, except those that it handed out."""
        handed_out = [tensor.untyped_storage() for tensor in outputs if tensor.layout is torch.strided]
        for bucket in self._units[unit]:
            self._users[id(bucket)] -= 1
            # A layer may return a bias for its caller to add; it stays until the chunk is released.
            if not any(storage is bucket.storage for storage in handed_out):
                self._drop(bucket)

    def _use(self, unit: int) -> None:
        """Wait until the unit's weights are whole, and start gathering those of the units that follow."""
        absent = [b for b in self._units[unit] if b.presence is not ShardedState.WHOLE]
        if not absent:
            return
        # The order below is that of need. Disk and group serve one request after another: first what this
        # unit needs, then what follows. Each step depends only on which units have run, and those are the
        # same on every rank, so all ranks gather in the same order.
        self._read_ahead(unit, self._backward)
        for bucket in absent:
            self.unshard(bucket)
        if self._previous is not None:
            self._follower[self._backward, self._previous] = unit
        self._previous = unit
        follower = self._follower.get((self._backward, unit))
        if follower is not None and self.policy.gathers.overlap:
            self._prefetch(follower, self._backward)
        self._read_ahead(unit, self._backward)
        # Last: what follows is already on its way while this rank waits, and while the unit computes.
        for bucket in absent:
            bucket.wait()

    def _read_ahead(self, first: int, backward: bool) -> None:
        """Start to read the slices of the units that are gathered next, from unit `first` on."""
        own = sum(bucket.presence is ShardedState.SHARD for bucket in self._units[first])
        ahead: list[Bucket] = []
        seen: set[int] = set()
        unit: int | None = first
        while unit is not None and unit not in seen and len(ahead) < own + SLICES_AHEAD:
            seen.add(unit)
            ahead += [bucket for bucket in self._units[unit] if bucket.presence is ShardedState.SHARD]
            unit = self._follower.get((backward, unit), self._neighbours.get((backward, unit)))
        self._expect(ahead[: own + SLICES_AHEAD])

    def _expect(self, ahead: list[Bucket]) -> None:
        """Read these slices ahead, and no others."""
        if ahead != self._ahead:
            self._ahead = ahead
            self.store.read_ahead(ahead)

    def _prefetch(self, unit: int | None, backward: bool) -> None:
        """Start gathering `unit` and the units that follow it, as far as the policy allows."""
        room, seen = self.policy.gathers.prefetch, set()
        while unit is not None and unit not in seen:
            seen.add(unit)
            ahead = [b for b in self._units[unit] if b.presence is not ShardedState.WHOLE]
            room -= sum(b.layout.padded for b in ahead)
            if room < 0:  # a smaller one further on would take the room of this one, which is needed sooner
                return
            for bucket in ahead:
                self.unshard(bucket)
            unit = self._follower.get((backward, unit))


def _gathered_after_updates(bucket: Bucket) -> bool:
    row = bucket.layout.row
    return row.shard_state and not row.shard_params


def _tensors(value: object) -> Iterator[Tensor]:
    """All tensors in a module's return value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
