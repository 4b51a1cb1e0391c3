"""`Update`: one update of loaded buckets by a rule, in one phase or two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megazero.mpu.context import ParallelContext
from megazero.mpu.host import on_device
from megazero.ops.segments import NO_SIGNALS, DeviceSignals
from megazero.optim.rule import (
    SERVER_ERROR,
    WORKER_ERROR,
    PassEnds,
    Pieces,
    Replicas,
    UpdateRule,
    is_local_rule,
    is_norm_rule,
    is_reducing_rule,
)
from megazero.zero.matrices import WholeMatrices
from megazero.zero.norms import ParameterNorms, reduce_over_slices
from megazero.zero.store.store import GRADIENT, WEIGHT, LoadedBucket

PerGroup = float | Sequence[float]
"""One value for all parameter groups, or one for each."""

Phase = Callable[[Sequence[LoadedBucket]], None]


@dataclass(frozen=True)
class UpdateFacts:
    """The values that an update depends on besides the buckets.

    Attributes:
        number: number of the update, from 1.
        lr: learning rate.
        weight_decay: weight decay of the parameters that decay.
        factor: the factor by which the gradient sums are multiplied first.
        signals: a further factor, and whether to change anything, if only the device knows.
    """

    number: int
    lr: PerGroup
    weight_decay: PerGroup
    factor: float
    signals: DeviceSignals = NO_SIGNALS


@runtime_checkable
class BucketRule(UpdateRule, Protocol):
    """A rule that updates a bucket as a whole, such as one that needs whole parameters from several ranks."""

    def move_bucket(self, loaded: LoadedBucket, facts: UpdateFacts, context: ParallelContext) -> None:
        """Update masters and state in place from ready gradients; leave frozen parameters as they are."""


@dataclass(frozen=True)
class _RulePiece:
    """One segment or one member of a loaded bucket, as a rule gets it."""

    state: dict[str, Tensor]
    lr: float
    decay: float
    exempt: bool
    loaded: LoadedBucket
    member: int
    where: slice

    @property
    def weights(self) -> Tensor:
        """Its masters."""
        return self.loaded.flats[WEIGHT][self.where]

    @property
    def gradient(self) -> Tensor:
        """Its gradient."""
        return self.loaded.flats[GRADIENT][self.where]

    @property
    def out(self) -> Tensor | None:
        """The tensor for the new weights, if the rule writes them besides the masters."""
        return None if self.loaded.weights is None else self.loaded.weights[self.where]


class Update:
    """Scales gradients, lets the rule sum them if it does that itself, moves the masters, writes the weights.

    A rule that works in one pass does all that itself and leaves gradients as they are. For others, gradients
    are scaled in place, and sums of a narrower dtype than fp32 are widened and rounded afterwards, as masters
    are for all rules. If a rule asks for norms, call `prepare` for all buckets before `apply` for any.

    Args:
        rule: updates each piece.
        facts: the facts of this step.
        context: this rank's groups and place.
        norms: norms of individual parameters; None if the rule asks for none.
        matrices: puts whole matrices together; None if the rule asks for none.
    """

    def __init__(
        self,
        rule: UpdateRule,
        facts: UpdateFacts,
        context: ParallelContext,
        norms: ParameterNorms | None = None,
        matrices: WholeMatrices | None = None,
    ):
        self.rule = rule
        self.context = context
        self.facts = facts
        self.norms = norms
        self.matrices = matrices

    def prepare(self, loaded_buckets: Sequence[LoadedBucket]) -> None:
        """Run the rule's `prepare` on these buckets and measure what it returns.

        Changes gradients and moments.
        """
        self._in_fp32(loaded_buckets, self._measure, first=True, last=False)

    def apply(self, loaded_buckets: Sequence[LoadedBucket]) -> None:
        """Update these buckets and write their `weights`, if they have any."""
        written = [self._rule_writes(loaded) for loaded in loaded_buckets]
        mine = [
            loaded if writes else replace(loaded, weights=None)
            for loaded, writes in zip(loaded_buckets, written, strict=True)
        ]
        self._in_fp32(mine, self._move, first=self.norms is None, last=True)
        for loaded, writes in zip(loaded_buckets, written, strict=True):
            if self.rule.needs.one_pass:
                loaded.bucket.sums_scale *= self.facts.factor
            if loaded.weights is not None:
                layout = loaded.bucket.layout
                rest = layout.overlap(layout.numel, layout.padded) if writes else slice(None)
                loaded.weights[rest].copy_(in_use(self.rule, loaded)[rest])

    def _rule_writes(self, loaded: LoadedBucket) -> bool:
        """Whether the rule writes the weights while it moves the masters."""
        master, weights = loaded.flats[WEIGHT], loaded.weights
        fits = weights is not None and weights.device == master.device and master.dtype == torch.float32
        return self.rule.needs.one_pass and fits and not loaded.bucket.frozen()

    def _in_fp32(
        self, loaded_buckets: Sequence[LoadedBucket], phase: Phase, *, first: bool, last: bool
    ) -> None:
        """Run a phase on buckets in fp32: one by one on those of narrower dtypes, together on the others.

        Args:
            loaded_buckets: the buckets of a visit.
            phase: the work to do on gradients that are ready for use.
            first: whether it is the first phase, in which fp32 gradients are made ready in place.
            last: whether it is the last phase, after which narrower dtypes are rounded.
        """
        together = []
        for loaded in loaded_buckets:
            kinds = (WEIGHT,) if self.rule.needs.one_pass else (WEIGHT, GRADIENT)
            if all(loaded.flats[kind].dtype == torch.float32 for kind in kinds):
                if first and not self.rule.needs.one_pass:
                    self._make_ready(loaded)
                together.append(loaded)
            else:
                self._widened(loaded, phase, last=last)
        if together:
            phase(together)

    def _widened(self, loaded: LoadedBucket, phase: Phase, *, last: bool) -> None:
        grads, master = loaded.flats[GRADIENT], loaded.flats[WEIGHT]
        wide, wide_grads = master.to(torch.float32), grads
        if not self.rule.needs.one_pass:
            wide_grads = grads.to(torch.float32, copy=True).mul_(self.facts.factor)
        phase([replace(loaded, flats={**loaded.flats, WEIGHT: wide, GRADIENT: wide_grads})])
        if last:
            if wide_grads is not grads:
                grads.copy_(wide_grads)
            if wide is not master:
                master.copy_(wide)

    def _make_ready(self, loaded: LoadedBucket) -> None:
        """Scale the gradients, and let the rule sum them over the replicas if it does that itself."""
        grads = loaded.flats[GRADIENT]
        if self.facts.factor != 1.0:
            grads.mul_(self.facts.factor)
        if is_reducing_rule(self.rule) and not self.rule.sums_exactly(self.facts.number):
            replicas = Replicas(
                loaded.bucket.comm_hook.group,
                loaded.bucket.layout.spans,
                loaded.flats[WORKER_ERROR],
                loaded.flats[SERVER_ERROR],
                partial(reduce_over_slices, loaded.bucket, self.context),
                [of_group(self.facts.lr, member.group) for member in loaded.bucket.layout.members],
            )
            state = state_of(self.rule, loaded)
            spans = [slice(*loaded.bucket.layout.spans[number]) for number in loaded.bucket.frozen()]
            held = [part for kind in self.rule.state_names for part in map(state[kind].__getitem__, spans)]
            kept = [part.clone() for part in held]
            self.rule.reduce(grads, state, replicas=replicas, step=self.facts.number)
            for part, value in zip(held, kept, strict=True):
                part.copy_(value)

    def _measure(self, loaded_buckets: Sequence[LoadedBucket]) -> None:
        rule, norms = self.rule, self.norms
        assert norms is not None
        assert is_norm_rule(rule), "norms are measured for a rule that asks for them"
        calls: dict[float, list[_RulePiece]] = {}
        for piece in self._pieces(loaded_buckets):
            calls.setdefault(self._scale(piece), []).append(piece)
        for scale, pieces in calls.items():
            prepared = rule.prepare(self._for_rule(pieces, scale, [None] * len(pieces)))
            for piece, tensors in zip(pieces, prepared, strict=True):
                norms.add(piece.loaded.bucket, piece.member, tensors)

    def _scale(self, piece: _RulePiece) -> float:
        """The factor of a piece's gradient in a rule that works in one pass."""
        return self.facts.factor * piece.loaded.bucket.sums_scale

    def _for_rule(
        self, pieces: Sequence[_RulePiece], scale: float = 1.0, outs: Sequence[Tensor | None] = ()
    ) -> Pieces:
        """The pieces as a rule's arguments; only a one-pass rule gets a scale and output tensors."""
        return Pieces(
            [piece.weights for piece in pieces],
            [piece.gradient for piece in pieces],
            [piece.state for piece in pieces],
            [piece.decay for piece in pieces],
            self.facts.number,
            PassEnds(scale, outs, self.facts.signals) if self.rule.needs.one_pass else None,
        )

    def _move(self, loaded_buckets: Sequence[LoadedBucket]) -> None:
        if isinstance(self.rule, BucketRule):
            for loaded in loaded_buckets:
                self.rule.move_bucket(loaded, self.facts, self.context)
            return
        if self.matrices is None:
            self._step(list(self._pieces(loaded_buckets)), None)
            return
        for loaded in loaded_buckets:  # one bucket's matrices at a time are whole
            pieces = list(self._pieces([loaded]))
            self._step(pieces, self._updates(self.matrices, loaded, pieces))

    def _updates(self, matrices: WholeMatrices, loaded: LoadedBucket, pieces: Sequence[_RulePiece]) -> Tensor:
        """The updates of a bucket by a rule for whole matrices, flat over its `state_range`."""
        prepared = torch.zeros_like(loaded.flats[WEIGHT])
        for piece, tensor in zip(pieces, matrices.rule.prepare(self._for_rule(pieces)), strict=True):
            prepared[piece.where] = tensor
        return matrices.updates(loaded.bucket, prepared)

    def _step(self, pieces: Sequence[_RulePiece], updates: Tensor | None) -> None:
        """Run the rule on the pieces, one call for each learning rate."""
        calls: dict[tuple[float, float], list[_RulePiece]] = {}
        for piece in pieces:
            calls.setdefault((piece.lr, self._scale(piece)), []).append(piece)
        for (lr, scale), pieces in calls.items():
            asked: dict[str, object] = {}
            if self.norms is not None:
                asked["norms"] = [
                    on_device(self.norms.of(p.loaded.bucket, p.member), p.loaded.flats[WEIGHT].device)
                    for p in pieces
                ]
                asked["exempt"] = [piece.exempt for piece in pieces]
            if updates is not None:
                asked["updates"] = [updates[piece.where] for piece in pieces]
            self.rule.step(self._for_rule(pieces, scale, [piece.out for piece in pieces]), lr, **asked)

    def _group_is_exempt(self, group: int) -> bool:
        """Whether this group has a weight decay of its own, which is 0, so that its parameters are exempt."""
        decay = self.facts.weight_decay
        return not isinstance(decay, (int, float)) and decay[group] == 0.0

    def _pieces(self, loaded_buckets: Sequence[LoadedBucket]) -> Iterator[_RulePiece]:
        """One piece per segment, or per member if the rule looks at individual ones or some are frozen."""
        scalars = () if self.norms is None else self.rule.needs.scalars
        whole = self.norms is not None or self.matrices is not None
        for loaded in loaded_buckets:
            layout, flats = loaded.bucket.layout, loaded.flats
            frozen = loaded.bucket.frozen()
            ranges = layout.member_segments if whole or frozen else layout.segments
            for number, segment in enumerate(ranges):
                where = layout.overlap(segment.start, segment.stop)
                if where.start < where.stop and number not in frozen:
                    yield _RulePiece(
                        {kind: flats[kind][where] for kind in self.rule.state_names}
                        | {kind: flats[kind][number : number + 1] for kind in scalars},
                        of_group(self.facts.lr, segment.group),
                        of_group(self.facts.weight_decay, segment.group) if segment.weight_decay else 0.0,
                        not segment.weight_decay or self._group_is_exempt(segment.group),
                        loaded,
                        number,
                        where,
                    )


def sums_exactly(rule: UpdateRule, step: int) -> bool:
    """Whether the hooks sum the gradients of update number `step`, exactly."""
    return not is_reducing_rule(rule) or rule.sums_exactly(step)


def in_use(rule: UpdateRule, loaded: LoadedBucket) -> Tensor:
    """The weights that the model is to use, from the masters of a visit."""
    master = loaded.flats[WEIGHT]
    if not is_local_rule(rule) or not loaded.bucket.key.trainable:
        return master
    return rule.in_use(master, state_of(rule, loaded))


def state_of(rule: UpdateRule, loaded: LoadedBucket) -> dict[str, Tensor]:
    """A bucket's state as the rule names it."""
    return {kind: loaded.flats[kind] for kind in (*rule.state_names, *rule.needs.scalars)}


def of_group(value: PerGroup, group: int) -> float:
    """The value of a parameter group."""
    return value if isinstance(value, (int, float)) else value[group]
