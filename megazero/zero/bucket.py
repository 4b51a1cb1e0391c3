"""Buckets: flat buffers that parameters live in, so that one call gathers, reduces or updates many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from megazero.errors import ConfigError
from megazero.mpu import DONE, ParallelContext, ParamSpec, Work, spec_of
from megazero.zero.plan import BucketKey, Slot, plan_buckets
from megazero.zero.policy import ZeroPolicy
from megazero.zero.table import STAGES
from megazero.zero.unit import Unit

Fill = Callable[[Sequence[nn.Parameter]], None]


@dataclass(frozen=True)
class Segment:
    """A range of a bucket whose elements norm and update treat alike.

    Attributes:
        start: first element.
        stop: one past the last.
        weight_decay: whether they decay.
        counted: whether this rank's copy counts in sums over the model.
        partial_grad: whether gradients must be summed over the tensor-parallel ranks.
        group: number of their parameter group.
    """

    start: int
    stop: int
    weight_decay: bool
    counted: bool
    partial_grad: bool
    group: int = 0


class Presence(Enum):
    """Whether a bucket's whole weights are on this rank."""

    SHARD = "shard"
    ARRIVING = "arriving"
    WHOLE = "whole"


class Bucket:
    """Parameters in one flat buffer, their master weights and their gradient sums.

    The buffer is padded so that each of the N ranks of `group` owns an equal slice. What the bucket's row
    says is sharded has `shard_size` elements, what it does not has `padded`.

    Where weights are sharded, the buffer's storage is emptied between uses. The tensor stays, so what
    autograd has saved of it (views included) is alive again once the storage has been filled; meanwhile
    the parameters read as NaN and cannot be written.

    Attributes:
        full: flat weights of all parameters, [padded]; the parameters' data are views of it.
        storage: that of `full`.
        shard: this rank's slice of the weights, [shard_size].
        master: the optimizer's weights, over `state_range`; the weights themselves where dtypes agree.
        grads: gradient sums, [padded] or [shard_size]; None where the parameters are not trained.

    Args:
        key: what the parameters have in common.
        params: in buffer order.
        groups: each parameter's group number.
        policy: dtypes, and whether there is a second partition.
        context: groups and device.
        fill: gives parameters that are on the meta device their values.
    """

    def __init__(
        self,
        key: BucketKey,
        params: Sequence[nn.Parameter],
        groups: Sequence[int],
        policy: ZeroPolicy,
        context: ParallelContext,
        fill: Fill | None,
    ):
        self.key = key
        self.row = STAGES[key.row]
        self.params = list(params)
        self.specs = [spec_of(p) for p in self.params]
        self.group = context.groups["expert_replica" if key.expert else "replica"]
        self.numel = sum(p.numel() for p in self.params)
        self.shard_size = max(1, -(-self.numel // self.group.size))
        self.padded = self.shard_size * self.group.size
        self.own = slice(self.group.rank * self.shard_size, (self.group.rank + 1) * self.shard_size)
        self.segments = _segments(self.params, groups, context.tp.rank)
        self.presence = Presence.WHOLE
        self._work: Work = DONE
        self._node = context.node if policy.hpz > 1 and not key.expert else None
        self._second: Tensor | None = None

        self.full = torch.zeros(self.padded, dtype=key.dtype, device=context.device)
        self.storage = self.full.untyped_storage()
        self._views = self.views(self.full)
        # Expanded, they take no memory, and writes in place fail.
        self._placeholders = [
            torch.full((), float("nan"), dtype=key.dtype, device=context.device).expand(p.shape)
            for p in self.params
            if self.row.shard_params
        ]
        _adopt(self.params, self._views, fill)
        self.shard = self.full[self.own].clone() if self.row.shard_params else self.full[self.own]
        weights = self._weights()
        self.master = weights.to(policy.main_dtype) if key.trainable else weights
        self.grads: Tensor | None = None
        if key.trainable:
            size = self.shard_size if self.row.shard_grads else self.padded
            self.grads = torch.zeros(size, dtype=policy.accumulation_dtype, device=context.device)
        self.free()

    @property
    def state_range(self) -> slice:
        """The elements that this rank updates."""
        return self.own if self.row.shard_state else slice(0, self.padded)

    @property
    def own_grads(self) -> Tensor:
        """The gradient sums over `state_range`."""
        assert self.grads is not None, "a frozen bucket has no gradients"
        return self.grads[self.own] if self.row.shard_state and not self.row.shard_grads else self.grads

    @property
    def offsets(self) -> list[int]:
        """Where each parameter starts."""
        starts = [0]
        for param in self.params:
            starts.append(starts[-1] + param.numel())
        return starts[:-1]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a whole flat tensor, in its shape."""
        return [
            flat[start : start + param.numel()].view(param.shape)
            for start, param in zip(self.offsets, self.params, strict=True)
        ]

    def pieces(self, flat: Tensor) -> Iterator[tuple[Segment, Tensor]]:
        """Each segment's part of a flat tensor over `state_range`, where it has any."""
        for segment in self.segments:
            piece = self._overlap(flat, segment.start, segment.stop)
            if piece.numel():
                yield segment, piece

    def named_pieces(self, flat: Tensor) -> Iterator[tuple[ParamSpec, slice, Tensor]]:
        """Each parameter's part of a flat tensor over `state_range`, where it has any.

        Yields:
            The spec, the range of the flattened parameter, and the part.
        """
        for spec, param, start in zip(self.specs, self.params, self.offsets, strict=True):
            piece = self._overlap(flat, start, start + param.numel())
            if piece.numel():
                first = max(0, self.state_range.start - start)
                yield spec, slice(first, first + piece.numel()), piece

    def fetch(self) -> None:
        """Start gathering the whole weights, if they are not there."""
        if self.presence is not Presence.SHARD:
            return
        self._allocate(self.padded)
        if self._second is None:
            self._work = self.group.all_gather(self.full, self.shard, async_op=True)
        else:
            self._work = self._node.all_gather(self.full, self._second, async_op=True)
        self.presence = Presence.ARRIVING

    def arrive(self) -> None:
        """Return when the whole weights that `fetch` started to gather are there."""
        if self.presence is not Presence.ARRIVING:
            return
        self._work.wait()
        self._work = DONE
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view
        self.presence = Presence.WHOLE
        if self._node is not None and self._second is None:
            size = self.padded // self._node.size
            self._second = self.full[self._node.rank * size : (self._node.rank + 1) * size].clone()

    def free(self) -> None:
        """Keep the shard alone, where the row says so."""
        if not self.row.shard_params or self.presence is Presence.SHARD:
            return
        self.arrive()
        for param, nothing in zip(self.params, self._placeholders, strict=True):
            param.data = nothing
        self._allocate(0)
        self.presence = Presence.SHARD

    def forget_second(self) -> None:
        """Drop the second partition, which holds the weights as they were gathered last."""
        self._second = None

    def publish(self) -> Work:
        """Write `master` to the weights; where replicas update shards, start to gather them."""
        weights = self._weights()
        if self.master is not weights:
            weights.copy_(self.master)
        self.forget_second()
        if self.row.shard_state and self.presence is Presence.WHOLE:
            return self.group.all_gather(self.full, self.shard, async_op=True)
        return DONE

    def adopt_full(self) -> None:
        """Take what was written to the whole weights over into the shard and the master."""
        assert self.presence is Presence.WHOLE
        if self.row.shard_params:
            self.shard.copy_(self.full[self.own])
        self.forget_second()
        weights = self._weights()
        if self.master is not weights:
            self.master.copy_(weights)

    def gather_state(self, flat: Tensor) -> Tensor:
        """A whole flat tensor [padded] from every rank's part over its `state_range`."""
        if not self.row.shard_state:
            return flat
        whole = flat.new_empty(self.padded)
        self.group.all_gather(whole, flat.contiguous()).wait()
        return whole

    def _allocate(self, numel: int) -> None:
        """Give the whole buffer room for `numel` elements; meta tensors have no memory."""
        if not self.full.is_meta:
            self.storage.resize_(numel * self.full.element_size())

    def _weights(self) -> Tensor:
        """The weights over `state_range`."""
        return self.shard if self.row.shard_state else self.full

    def _overlap(self, flat: Tensor, start: int, stop: int) -> Tensor:
        first, last = self.state_range.start, self.state_range.stop
        start, stop = max(start, first), min(stop, last)
        return flat[start - first : max(start, stop) - first] if start < last else flat[:0]


def build_buckets(
    units: Sequence[Unit],
    policy: ZeroPolicy,
    context: ParallelContext,
    fill: Fill | None = None,
    groups: Mapping[int, int] | None = None,
) -> list[Bucket]:
    """Move the parameters of `units` into buckets, in the order in which backward completes them.

    Parameters on the meta device come to be one bucket at a time, so where weights are sharded the whole
    model is never on one rank.

    Args:
        units: in the order in which forward uses them.
        policy: what is sharded.
        context: groups and device.
        fill: called with each bucket's parameters, writes their initial values; needed for meta parameters.
        groups: parameter groups by ``id`` of the parameter; 0 where it says nothing.

    Raises:
        ConfigError: parameters are on the meta device, the context's device is real, and `fill` is None.
    """
    first_use: dict[int, tuple[int, nn.Parameter]] = {}
    for u, unit in enumerate(units):
        for param in unit.params:
            first_use.setdefault(id(param), (u, param))
    uses = Counter(id(param) for unit in units for param in set(unit.params))
    numbers = groups or {}
    slots = [
        Slot(
            spec=spec_of(param),
            numel=param.numel(),
            dtype=param.dtype,
            chunk=units[u].chunk,
            unit=u,
            trainable=param.requires_grad,
            alone=uses[id(param)] > 1 or spec_of(param).shared or spec_of(param).tied_with is not None,
            group=numbers.get(id(param), 0),
        )
        for u, param in first_use.values()
    ]
    params = [param for _, param in first_use.values()]
    sizes = {expert: context.groups[f"{'expert_' * expert}replica"].size for expert in (False, True)}
    return [
        Bucket(key, [params[i] for i in members], [slots[i].group for i in members], policy, context, fill)
        for key, members in plan_buckets(slots, policy, sizes.__getitem__)
    ]


def _segments(params: Iterable[nn.Parameter], groups: Sequence[int], tp_rank: int) -> tuple[Segment, ...]:
    """One segment per run of parameters that are treated alike."""
    found: list[Segment] = []
    start, last = 0, None
    for param, group in zip(params, groups, strict=True):
        spec, stop = spec_of(param), start + param.numel()
        traits = (spec.weight_decay, spec.counts_on(tp_rank), spec.partial_grad, group)
        # Cut alike on all tensor-parallel ranks: how an update rounds may depend on where a piece ends, and
        # copies of a parameter must stay equal in every bit.
        kind = (spec.weight_decay, spec.shard_dim is None, spec.tied_with is None, spec.partial_grad, group)
        if kind == last:
            found[-1] = Segment(found[-1].start, stop, *traits)
        else:
            found.append(Segment(start, stop, *traits))
        start, last = stop, kind
    return tuple(found)


@torch.no_grad()
def _adopt(params: Sequence[nn.Parameter], views: Sequence[Tensor], fill: Fill | None) -> None:
    """Make each parameter's data a view of the bucket, with the values that it has or `fill` gives."""
    unmade = []
    for param, view in zip(params, views, strict=True):
        if param.is_meta and not view.is_meta:
            unmade.append(param)
            # Empty at first: a parameter made from the view would share its version counter, and each
            # gather would then look to autograd like a change of what it has saved.
            real = nn.Parameter(view.new_empty(0), requires_grad=param.requires_grad)
            real.__dict__.update(param.__dict__)
            torch.utils.swap_tensors(param, real)
        else:
            view.copy_(param.data)
        param.data = view
    if unmade and fill is None:
        raise ConfigError(
            f"`fill` must be given for the {len(unmade)} parameters on the meta device, such as "
            f"{spec_of(unmade[0]).name}, but is None; pass a function that writes initial values"
        )
    if unmade:
        fill(unmade)
