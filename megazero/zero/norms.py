"""Norms of individual parameters whose parts lie on several ranks, reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from megazero.mpu.context import ParallelContext
from megazero.mpu.grid import slice_axes
from megazero.mpu.group import Reduction
from megazero.mpu.param_spec import SHARERS, ParamSpec
from megazero.optim.grad_norm import local_square_sum
from megazero.zero.bucket import Bucket


class ParameterNorms:
    """Sums squares of each parameter's tensors over the ranks that hold parts of it, each element once.

    These ranks are the ones along the axes that may slice it, and its replicas where they shard state.
    However many parameters there are, this takes one call over each of these groups for dense parameters, and
    one for experts. A tied copy is measured on its own stage, where it has the same values as the original.
    All copies then use the mean of their norms: their sums may have been taken in different orders, but they
    must be updated alike, bit for bit.

    Usage: `add` each piece, `reduce`, then read each norm with `of`.

    Args:
        buckets: the buckets whose parameters are measured; the same on all these ranks.
        context: this rank's groups, place and device.
        count: number of norms of each parameter.
    """

    def __init__(self, buckets: Sequence[Bucket], context: ParallelContext, count: int):
        self.context = context
        self._first: dict[Bucket, int] = {}
        self._by_replicas: dict[str, list[Bucket]] = {}
        for bucket in buckets:
            self._by_replicas.setdefault(bucket.key.replicas, []).append(bucket)
        total = 0
        for bucket in chain.from_iterable(self._by_replicas.values()):
            self._first[bucket] = total
            total += len(bucket.layout.members)
        self._norms = torch.zeros(total, count, dtype=torch.float64, device=context.device)
        self._measured: list[tuple[Tensor, Sequence[Tensor]]] = []  # rows, and norms whose squares they get

    def add(self, bucket: Bucket, member: int, tensors: Sequence[Tensor]) -> None:
        """Measure this rank's part of one member of a bucket.

        Norms that a rule's kernel has measured itself must not change before `reduce`, which squares those of
        all parameters in one launch.
        """
        number, _ = bucket.layout.specs[member].copy(self.context.place)
        if number != 0:  # the other copies have the same elements
            return
        row = self.of(bucket, member)
        if all(tensor.dim() == 0 and tensor.device == row.device for tensor in tensors):
            self._measured.append((row, tensors))
        else:
            row.copy_(torch.stack([local_square_sum([tensor]) for tensor in tensors]))

    def _square_measured(self) -> None:
        if not self._measured:
            return
        rows, norms = zip(*self._measured, strict=True)
        squares = torch.stack(list(chain.from_iterable(norms))).double().square()
        torch._foreach_copy_(list(rows), list(squares.view(len(rows), -1).unbind()))
        self._measured.clear()

    def reduce(self) -> None:
        """Sum over the ranks and take the square roots; every rank calls this."""
        self._square_measured()
        for replicas, buckets in self._by_replicas.items():
            count = sum(len(bucket.layout.members) for bucket in buckets)
            first = self._first[buckets[0]]
            mine = self._norms[first : first + count]
            if any(bucket.layout.row.shard_state for bucket in buckets):
                self.context.groups[replicas].all_reduce(mine).wait()
            specs = [spec for bucket in buckets for spec in bucket.layout.specs]
            _over_axes(mine, specs, replicas, self.context, "sum")
        self._agree_over_tied_stages()
        self._norms.sqrt_()

    def _agree_over_tied_stages(self) -> None:
        for sharers in SHARERS:
            stages = self.context.groups[sharers]
            tied = [
                self.of(bucket, number)
                for bucket in self._first
                for number, spec in enumerate(bucket.layout.specs)
                if spec.shared and spec.sharers == sharers
            ]
            if stages.size > 1 and tied:
                together = torch.stack(tied)
                stages.all_reduce(together).wait()
                for mine, total in zip(tied, together, strict=True):
                    mine.copy_(total / stages.size)

    def of(self, bucket: Bucket, member: int) -> Tensor:
        """The norms of one member of a bucket, fp64 [count], on the device."""
        return self._norms[self._first[bucket] + member]


def reduce_over_slices(
    bucket: Bucket, context: ParallelContext, measured: Tensor, operation: Reduction
) -> None:
    """Reduce each rank's measurements of its slices of a bucket's parameters in place, each element once.

    Every rank of the model calls this. Tied copies agree on the mean, as in `ParameterNorms`.

    Args:
        bucket: the bucket.
        context: this rank's groups and place.
        measured: [members, count] on the device, at least 0.
        operation: ``sum`` or ``max``.
    """
    specs = bucket.layout.specs
    for row, spec in zip(measured, specs, strict=True):
        if spec.copy(context.place)[0]:  # another rank measured the same elements
            row.zero_()
    _over_axes(measured, specs, bucket.key.replicas, context, operation)
    stages = context.groups[specs[0].sharers]
    if stages.size > 1 and specs[0].shared:  # then it is the bucket's only one
        stages.all_reduce(measured).wait()
        measured /= stages.size


def _over_axes(
    measured: Tensor,
    specs: Sequence[ParamSpec],
    replicas: str,
    context: ParallelContext,
    operation: Reduction,
) -> None:
    """Reduce each row over the axes along which ranks hold other parts, or copies, of its parameter."""
    for axis in slice_axes(replicas):
        group = context.groups[axis]
        numbers = [i for i, spec in enumerate(specs) if axis != "ep" or not spec.expert]
        if len(numbers) == len(specs):
            group.all_reduce(measured, operation).wait()
        elif numbers:
            chosen = measured[numbers]
            group.all_reduce(chosen, operation).wait()
            measured[numbers] = chosen
