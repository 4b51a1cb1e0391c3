"""The optimizer step over buckets: norm, clipping, skipping, update, and the way back to the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Work
from megazero.mpu.messages import broadcast_value, fold_values
from megazero.mpu.param_spec import ParamSpec
from megazero.optim.grad_norm import clip_coefficient, clipped_on_device
from megazero.optim.rule import SERVER_ERROR, WORKER_ERROR, UpdateRule, is_matrix_rule
from megazero.zero.bucket import Bucket, whole_state
from megazero.zero.comm_hooks.exact import ExactCommHook
from megazero.zero.delayed import DelayedUpdates
from megazero.zero.fitting import check_matrices, check_reduction
from megazero.zero.matrices import WholeMatrices
from megazero.zero.measures import Measures, as_used, read_total
from megazero.zero.norms import ParameterNorms
from megazero.zero.store.store import GRADIENT, WEIGHT, LoadedBucket, Store
from megazero.zero.update import PerGroup, Update, UpdateFacts, in_use, sums_exactly


@dataclass(frozen=True)
class StepReport:
    """The outcome of one optimizer step.

    Attributes:
        grad_norm: global L2 norm before clipping, each parameter counted once; inf or nan when skipped, and
            nan on the meta device.
        applied: False if a gradient on any rank was not finite; then no rank has changed anything.
        first_bad_parameter: when skipped, the first parameter of the model with such a gradient, the same on
            every layout, and the first rank that it is on.
    """

    grad_norm: float
    applied: bool
    first_bad_parameter: str | None = None


class Optimizer:
    """Updates the master weights of a store's buckets (Micikevicius et al. 2018), whole or sharded.

    Moments are fp32. Masters of a narrower dtype are updated in fp32 and rounded.

    Args:
        store: the model's buckets with their state; gets the rule's moments.
        rule: how a flat piece moves.
        context: for the norm, which spans all ranks.
        clip_grad: largest gradient norm; 0 turns clipping off.
        delayed: makes updates beside the next step; None makes each at once.

    Raises:
        ConfigError: `rule` sums gradients itself, but the store's hooks sum them already.
    """

    def __init__(
        self,
        store: Store,
        rule: UpdateRule,
        context: ParallelContext,
        clip_grad: float,
        delayed: DelayedUpdates | None = None,
    ):
        self.store = store
        self.delayed = delayed
        self.rule = rule
        self.context = context
        self.clip_grad = clip_grad
        self._trained = [bucket for bucket in store.buckets if bucket.key.trainable]
        self.measures = Measures(store, self._trained, context)
        check_reduction(rule, store, self._trained)
        check_matrices(rule, self._trained)
        for part, buckets in self._parts():
            store.make_moments(partial(self._initial_state, part), buckets)
        self.updates = 0

    @property
    def updates(self) -> int:
        """Updates made so far; skipped steps do not count."""
        return self._updates

    @updates.setter
    def updates(self, made: int) -> None:
        """Set the count, as after a resume, and let the hooks sum gradients as the next update needs."""
        self._updates = made
        for bucket in self._trained if self.rule.needs.reduces else ():
            assert isinstance(bucket.comm_hook, ExactCommHook), "stage 0 sends sums as they are"
            bucket.comm_hook.leave_sums = not self._sums_exactly

    @property
    def private_kinds(self) -> tuple[str, ...]:
        """Kinds of state of which each replica has its own, flat tensors [padded]."""
        needs = self.rule.needs
        return (*needs.private, WORKER_ERROR) if needs.reduces else needs.private

    @property
    def _sums_exactly(self) -> bool:
        """Whether the hooks sum the gradients of the next update."""
        return sums_exactly(self.rule, self.updates + 1)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Kinds of moments. With several rules, a bucket has those of its own rule only."""
        return tuple(dict.fromkeys(name for rule, _ in self._parts() for name in rule.state_names))

    def _parts(self) -> list[tuple[UpdateRule, list[Bucket]]]:
        """The rules and the trained buckets that each of them updates."""
        if not is_matrix_rule(self.rule):
            return [(self.rule, self._trained)]
        matrices = [bucket for bucket in self._trained if bucket.key.matrices]
        rest = [bucket for bucket in self._trained if not bucket.key.matrices]
        return [(self.rule, matrices), (self.rule.rest, rest)]

    @cached_property
    def queues(self) -> bool:
        """Whether an update can be queued before the host knows the gradient norm: the device decides."""
        by_the_host = self.delayed is not None or bool(self.store.tiers)
        return not by_the_host and self.rule.heeds_signals(self.context.device.type)

    @torch.no_grad()
    def queue(self, lr: PerGroup, weight_decay: PerGroup, grad_scale: float, norm: Tensor) -> None:
        """Queue the update that a later `step` with `queued` completes; a no-op if the norm is not finite.

        Args:
            lr, weight_decay, grad_scale: those of the step.
            norm: global norm of the gradient sums, fp64 [], on the device.
        """
        signals = clipped_on_device(norm * grad_scale, self.clip_grad, grad_scale)
        self._make(UpdateFacts(self.updates + 1, lr, weight_decay, 1.0, signals))

    @torch.no_grad()
    def step(
        self,
        lr: PerGroup,
        weight_decay: PerGroup,
        grad_scale: float = 1.0,
        norm: float | None = None,
        *,
        queued: bool = False,
    ) -> StepReport:
        """Update the model from the gradient sums, and leave the sums as the update used them.

        On the meta device the norm is unknown, and the step runs as if nothing had to be clipped.

        Args:
            lr: learning rate; one, or one per parameter group.
            weight_decay: weight decay of the parameters that decay; one, or one per parameter group.
            grad_scale: factor applied to the sums first (loss unscaling and averaging).
            norm: the result of `grad_norm`, if it is known already; NaN lets nothing change.
            queued: whether the update is queued already, with the same values.

        Returns:
            The report, the same on all ranks.
        """
        norm, clip = (self.grad_norm() if norm is None else norm) * grad_scale, 1.0
        if self.context.device.type != "meta":
            if not math.isfinite(norm):
                return StepReport(norm, False, self._first_bad_parameter())
            clip = clip_coefficient(norm, self.clip_grad)
        number = self.updates + 1
        facts = UpdateFacts(number, lr, weight_decay, grad_scale * clip)
        if queued:
            for bucket in self._trained:
                bucket.sums_scale *= facts.factor
        elif self.delayed is not None and number > self.delayed.after:
            update = Update(self.rule, facts, self.context)
            self.delayed.begin(update, self._trained, self.rule.state_names, self._publish)
        else:
            self._make(facts)
        self.updates = number
        return StepReport(norm, True)

    def _make(self, facts: UpdateFacts) -> None:
        works = [work for rule, buckets in self._parts() for work in self._update(rule, buckets, facts)]
        for work in works:
            work.wait()

    def _update(self, rule: UpdateRule, buckets: Sequence[Bucket], facts: UpdateFacts) -> list[Work]:
        """Update these buckets by a rule and start to publish their weights."""
        needs, moments = rule.needs, (*rule.state_names, *self._beside(rule))
        norms = ParameterNorms(buckets, self.context, len(needs.norms)) if needs.norms else None
        matrices = WholeMatrices(rule, self.context) if is_matrix_rule(rule) else None
        update = Update(rule, facts, self.context, norms, matrices)
        everything = (WEIGHT, GRADIENT, *moments)
        changed = moments if needs.one_pass else (GRADIENT, *moments)
        if norms is not None:
            for loaded_buckets in self.store.stream(everything, buckets, changes=changed):
                update.prepare(loaded_buckets)
            norms.reduce()
        works = []
        for visited in self.store.stream(everything, buckets, changes=(WEIGHT, *changed)):
            loaded_buckets = [replace(r, weights=self.store.open_weights(r.bucket)) for r in visited]
            update.apply(loaded_buckets)
            # Of the buckets of a visit, the next forward uses the last first.
            works += [loaded.bucket.publish(loaded.weights) for loaded in reversed(loaded_buckets)]
        return works

    def _publish(self, loaded: LoadedBucket) -> Work:
        """Start to publish a bucket's weights from its masters."""
        weights = self.store.open_weights(loaded.bucket)
        if weights is not None:
            weights.copy_(in_use(self.rule, loaded))
        return loaded.bucket.publish(weights)

    @torch.no_grad()
    def publish(self) -> None:
        """Publish the masters as the model's weights; every rank calls this."""
        works = []
        kinds = (WEIGHT, *self._moments) if self.rule.needs.in_use else (WEIGHT,)
        for loaded_buckets in self.store.stream(kinds, self.store.buckets):
            works += [self._publish(loaded) for loaded in reversed(loaded_buckets)]
        for work in works:
            work.wait()

    def grad_norm(self) -> float:
        """Global L2 norm of the gradient sums, as of `grad_squares`. NaN on the meta device."""
        return math.sqrt(read_total(self.grad_squares()))

    def grad_squares(self) -> Tensor:
        """The square of the global L2 norm of the gradient sums, fp64 []; the same on all ranks.

        Where the rule sums gradients itself, and has not done so yet, the norm is estimated: each replica's
        own sum times the number of replicas stands for the whole, and the estimate is the root mean square
        of their norms.
        """
        return self.measures.squares(GRADIENT, estimates=not self._sums_exactly)

    @torch.no_grad()
    def full_state(self, kinds: Sequence[str] | None = None) -> Iterator[tuple[ParamSpec, dict[str, Tensor]]]:
        """Each parameter's master weight and moments, whole over the data-parallel ranks.

        All ranks iterate to the end. One bucket at a time is whole; tensors may be views of live state. Where
        replicas have state of their own, each gets its own.

        Args:
            kinds: the kinds to gather, out of ``weight`` and `state_names`; None for all.

        Yields:
            ``spec, {"weight": ..., "exp_avg": ...}``, tensors in the shape of this tensor-parallel slice;
            of a parameter that is not trained the weight alone.
        """
        kinds = (WEIGHT, *self.state_names) if kinds is None else kinds
        for loaded_buckets in self.store.stream(kinds, self.store.buckets):
            for loaded in loaded_buckets:
                bucket, layout = loaded.bucket, loaded.bucket.layout
                views = {kind: layout.views(whole_state(bucket, flat)) for kind, flat in loaded.flats.items()}
                for i, spec in enumerate(layout.specs):
                    yield spec, {kind: parts[i] for kind, parts in views.items()}

    @torch.no_grad()
    def full_gradients(self) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Each trained parameter's whole gradient sum, until the next step starts; see `full_state`."""
        for loaded_buckets in self.store.stream((GRADIENT,), self._trained):
            for loaded in loaded_buckets:
                layout = loaded.bucket.layout
                whole = as_used(loaded.bucket, whole_state(loaded.bucket, loaded.flats[GRADIENT]))
                yield from zip(layout.specs, layout.views(whole), strict=True)

    @torch.no_grad()
    def load(self, tensor_of: Callable[[ParamSpec, str], Tensor], kinds: Sequence[str]) -> None:
        """Load saved masters and moments; call `publish` to update the weights.

        Args:
            tensor_of: the whole tensor of a parameter (of this tensor-parallel slice) by kind; asked only
                for parameters of which this rank holds a part.
            kinds: the kinds to load, out of ``weight`` and `state_names`; frozen parameters have no moments.
        """
        for bucket in self.store.buckets:
            mine = self.store.at_rest(bucket)
            for kind in (kind for kind in kinds if kind in mine):
                for number, span, piece in bucket.layout.member_pieces(mine[kind]):
                    piece.copy_(tensor_of(bucket.layout.specs[number], kind).reshape(-1)[span])

    @property
    def _moments(self) -> tuple[str, ...]:
        """All kinds of state besides the masters."""
        return (*self.state_names, *self._beside(self.rule))

    def _beside(self, rule: UpdateRule) -> tuple[str, ...]:
        """Kinds of state whose shape is not that of the masters."""
        errors = (WORKER_ERROR, SERVER_ERROR) if rule.needs.reduces else ()
        return (*rule.needs.scalars, *errors)

    def _initial_state(self, rule: UpdateRule, bucket: Bucket, master: Tensor) -> dict[str, Tensor]:
        layout, needs = bucket.layout, rule.needs
        sizes = dict.fromkeys(needs.scalars, len(layout.members))
        if needs.reduces:
            sizes |= {WORKER_ERROR: layout.padded, SERVER_ERROR: layout.shard_size}
        return rule.init_state(master) | {kind: master.new_zeros(size) for kind, size in sizes.items()}

    @torch.no_grad()
    def _first_bad_parameter(self) -> str:
        """The first parameter of the model with a gradient that is not finite, and the rank it is on."""
        first = min(self._bad_parameters(), default=None)
        bad = [] if first is None else [[list(first[0]), first[1], self.context.rank]]
        world, device = self.context.world, self.context.device
        folded = fold_values(world, bad, lambda a, b: sorted(a + b)[:1], device)
        worst = broadcast_value(world, folded, device)
        if not worst:
            return "none: the sum of squares overflowed"
        _, name, rank = worst[0]
        return f"{name} (rank {rank})"

    def _bad_parameters(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """The order and the name of each parameter with gradients here that are not finite."""
        for loaded_buckets in self.store.stream((GRADIENT,), self._trained):
            for loaded in loaded_buckets:
                for number, _, piece in loaded.bucket.layout.member_pieces(loaded.flats[GRADIENT]):
                    if not piece.isfinite().all():
                        member = loaded.bucket.layout.members[number]
                        yield member.order, member.spec.name
