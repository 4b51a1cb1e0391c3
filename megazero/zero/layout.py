"""`BucketLayout`: where the parameters of a bucket lie in its flat tensors; integers only, no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from megazero.mpu.grid import Place
from megazero.mpu.param_spec import ParamSpec
from megazero.zero.plan import BucketMember
from megazero.zero.table import StageRow


@dataclass(frozen=True)
class Segment:
    """A range of a bucket whose elements the norm and the update treat alike.

    Attributes:
        start: the first element.
        stop: one past the last element.
        weight_decay: whether weight decay applies to the elements.
        counted: whether this rank's copy counts in sums over the model.
        partial_grad: whether gradients must be summed over the tensor-parallel ranks.
        group: number of the elements' parameter group.
    """

    start: int
    stop: int
    weight_decay: bool
    counted: bool
    partial_grad: bool
    group: int = 0


@dataclass(frozen=True)
class BucketLayout:
    """Parameters one after another in a flat range, padded so that each replica owns an equal slice.

    A tensor that the row shards has `shard_size` elements on each rank, any other has `padded`.

    Attributes:
        row: what is sharded over the replicas.
        members: the parameters in buffer order.
        ranks: number of replicas.
        rank: this replica's number.
        place: this rank's place in the grid.
        multiple: with several replicas, a slice has a multiple of so many elements.
    """

    row: StageRow
    members: tuple[BucketMember, ...]
    ranks: int
    rank: int
    place: Place
    multiple: int = 1

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(member.numel for member in self.members)

    @cached_property
    def shard_size(self) -> int:
        """Number of elements of one replica's slice, padding included; at least one."""
        multiple = self.multiple if self.row.shard_state and self.ranks > 1 else 1
        return max(1, -(-self.numel // (self.ranks * multiple))) * multiple

    @cached_property
    def padded(self) -> int:
        """Number of elements of all slices."""
        return self.shard_size * self.ranks

    @cached_property
    def own(self) -> slice:
        """This replica's slice."""
        return slice(self.rank * self.shard_size, (self.rank + 1) * self.shard_size)

    @cached_property
    def state_range(self) -> slice:
        """The elements that this rank updates."""
        return self.own if self.row.shard_state else slice(0, self.padded)

    @cached_property
    def specs(self) -> tuple[ParamSpec, ...]:
        """The members' specs."""
        return tuple(member.spec for member in self.members)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Each member's start and stop."""
        stops = accumulate(member.numel for member in self.members)
        return tuple((stop - m.numel, stop) for stop, m in zip(stops, self.members, strict=True))

    @cached_property
    def member_segments(self) -> tuple[Segment, ...]:
        """One segment per member."""
        return tuple(
            Segment(
                *span,
                weight_decay=member.spec.weight_decay,
                counted=member.spec.counts_on(self.place),
                partial_grad=member.spec.partial_grad,
                group=member.group,
            )
            for member, span in zip(self.members, self.spans, strict=True)
        )

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """One segment per run of members of one kind.

        All ranks use the same segments: how an update rounds may depend on where a piece ends, and copies of
        a parameter must stay bitwise equal.
        """
        segments: list[Segment] = []
        last = None
        for member, segment in zip(self.members, self.member_segments, strict=True):
            joined = replace(segment, start=segments.pop().start) if member.kind == last else segment
            segments.append(joined)
            last = member.kind
        return tuple(segments)

    def overlap(self, start: int, stop: int) -> slice:
        """The slice of a flat tensor over `state_range` that holds elements `start` to `stop`, if any."""
        first, last = self.state_range.start, self.state_range.stop
        begin = min(max(start, first), last)
        return slice(begin - first, max(begin, min(stop, last)) - first)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each member's part of a whole flat tensor [padded], in the member's shape."""
        return [
            flat[start:stop].view(member.shape)
            for member, (start, stop) in zip(self.members, self.spans, strict=True)
        ]

    def member_pieces(self, flat: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
        """The parts of a flat tensor over `state_range` that belong to members, one per member in that range.

        Yields:
            The member's number, the range of the flattened member, and the part.
        """
        for number, (start, stop) in enumerate(self.spans):
            piece = flat[self.overlap(start, stop)]
            if piece.numel():
                first = max(0, self.state_range.start - start)
                yield number, slice(first, first + piece.numel()), piece


def counted_parts(layout: BucketLayout) -> list[slice]:
    """The parts of a flat tensor over `state_range` that count in sums over the model on this rank."""
    parts = [layout.overlap(s.start, s.stop) for s in layout.segments if s.counted]
    return [part for part in parts if part.start < part.stop]


def present_parts(layout: BucketLayout) -> list[slice]:
    """The parts from `counted_parts` without the padding of parameters (a vocabulary's), member by member."""
    parts = []
    for member, segment in zip(layout.members, layout.member_segments, strict=True):
        if segment.counted:
            runs = member.spec.present_elements(layout.place)
            parts += [layout.overlap(segment.start + run.start, segment.start + run.stop) for run in runs]
    return [part for part in parts if part.start < part.stop]


def own_sums(layout: BucketLayout, sums: Tensor) -> Tensor:
    """The part of gradient sums over `state_range`; sums are [padded], or [shard_size] if sharded."""
    return sums[layout.own] if layout.row.shard_state and not layout.row.shard_grads else sums
