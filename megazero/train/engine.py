"""One training step: micro-batches forward and backward, gradient sums, loss scale, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megazero.config.steps import Progress
from megazero.layers import NOTHING_SKIPPED, Fp8State, Skipping
from megazero.models import MicroBatch
from megazero.moe import RouterLoads
from megazero.mpu import ParallelContext, read_values
from megazero.optim import LearningRate, LossScaler, WeightDecay
from megazero.pipeline import Executor, Program
from megazero.train.distillation import Distillation
from megazero.train.losses import Losses, local_counts, loss_factors
from megazero.train.skipping import SkippingPlan
from megazero.train.timers import Timers
from megazero.zero import Bucket, DataParallel, Fingerprints, Optimizer


@dataclass(frozen=True)
class Programs:
    """What this rank's stage does in a step of so many micro-batches: (their number) -> program."""

    train: Callable[[int], Program]
    evaluate: Callable[[int], Program]


@dataclass(frozen=True)
class Schedules:
    """What follows from where the training stands.

    Attributes:
        learning_rate, weight_decay: of each update.
        skipping: what each step leaves out of the model's layers.
    """

    learning_rate: LearningRate
    weight_decay: WeightDecay
    skipping: SkippingPlan


@dataclass(frozen=True)
class StepResult:
    """What one training step did; the same on all ranks.

    Attributes:
        losses: of the global batch, by term.
        grad_norm: global norm before clipping; 0 where there was nothing to train on.
        learning_rate: of the schedule at this step.
        loss_scale: that backward used.
        skipped: whether the update was left out: a gradient was not finite, or nothing in the global batch
            counted for a trained term, so that `losses.total` is None.
        first_bad_parameter: the first with a gradient that is not finite.
        skipping: what it left out.
        tokens: how many choices fell on each expert of this stage, by the names of the routers' tallies, on
            the device.
        held: whether a judge held the update back.
    """

    losses: Losses
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    first_bad_parameter: str | None = None
    skipping: Skipping = NOTHING_SKIPPED
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    held: bool = False

    @property
    def bad(self) -> bool:
        """Whether the update was left out because a number was not finite."""
        return self.skipped and self.losses.total is not None and not self.held


@dataclass(frozen=True)
class Attempt:
    """One pass over a global batch: the gradient sums are there, and nothing has been changed yet.

    Attributes:
        losses: of the global batch.
        sums_norm: global norm of the gradient sums as they are.
        grad_norm: the same of the gradient, before clipping.
        local: this rank's own sums of the loss terms, float64 [terms], on the device.
        prints: fingerprints of this rank's own gradients, by the first parameter of each bucket, on the
            device; in the order of their reductions, and empty unless `Engine.witness` has been called.
        tallies: what routers counted.
    """

    losses: Losses
    sums_norm: float
    grad_norm: float
    local: Tensor
    prints: Sequence[tuple[str, Tensor]] = ()
    tallies: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """What becomes of an attempt.

    Attributes:
        attempt: the latest one, whose gradients there are.
        hold: whether to leave the update out.
    """

    attempt: Attempt
    hold: bool = False


Replay = Callable[[Sequence[MicroBatch]], Attempt]
"""Makes another attempt, with these micro-batches on this rank; every rank calls it.

Its gradients replace those of the attempt before.
"""

Judge = Callable[[Attempt, Replay], Judgement]
"""Decides, alike on all ranks, whether the update is made."""


class Engine:
    """Trains a model step by step. Its state is the optimizer's and `scaler_state`.

    Args:
        executor: runs this rank's stage of the model.
        programs: what it runs.
        optimizer: updates the weights.
        scaler: decides the loss scale.
        schedules: learning rate, weight decay and what is skipped, over the training.
        loads: what routers learn from a step besides gradients.
        context: for averaging over the ranks that hold other positions.
        lessons: what the model learns from a teacher; by default, it has none.
        fp8: what its 8-bit products remember; by default, it has none.
    """

    def __init__(
        self,
        executor: Executor[MicroBatch],
        programs: Programs,
        optimizer: Optimizer,
        scaler: LossScaler,
        schedules: Schedules,
        loads: RouterLoads,
        context: ParallelContext,
        distillation: Distillation | None = None,
        fp8: Fp8State | None = None,
    ):
        self.executor = executor
        self.programs = programs
        self.optimizer = optimizer
        self.scaler = scaler
        self.scaler_state = scaler.initial()
        self.schedules = schedules
        self.loads = loads
        self.context = context
        self.distillation = distillation or Distillation()
        self.fp8 = fp8 or Fp8State([], context.groups["stage"])
        self._prints: list[tuple[str, Tensor]] = []

    def nothing(self, progress: Progress) -> StepResult:
        """The result of a step that is passed over."""
        terms = self.executor.terms
        losses = Losses.of(terms, [0.0] * len(terms), [0.0] * len(terms))
        lr = self.schedules.learning_rate.at(progress)
        return StepResult(losses, 0.0, lr, self.scaler_state.scale, skipped=True)

    def witness(self, sharding: DataParallel) -> None:
        """From now on, take the fingerprints of gradients before `sharding` sums them over ranks."""
        fingerprints = Fingerprints(self.context.device)

        def note(bucket: Bucket, gradients: Tensor) -> None:
            self._prints.append((bucket.layout.specs[0].name, fingerprints.of(gradients)))

        sharding.observe(note)

    def train_step(
        self,
        batches: Sequence[MicroBatch],
        progress: Progress,
        timers: Timers,
        before_update: Callable[[], None] | None = None,
        judge: Judge | None = None,
    ) -> StepResult:
        """Train on one global batch. Where nothing in it counts, nothing changes, the loss scale neither.

        Args:
            batches: this rank's micro-batches, whole.
            progress: where the training stands before this step; schedules read it.
            timers: collects how long each phase takes.
            before_update: called when the state is about to change.
            judge: looks at the losses and the gradient norm before anything changes; nothing does if it
                holds the update.
        """
        scale = self.scaler_state.scale
        self.distillation.before(progress)
        skipping = self.schedules.skipping.at(progress)
        lr = self.schedules.learning_rate.at(progress)

        def attempt(these: Sequence[MicroBatch]) -> Attempt:
            return self._attempt(these, skipping, scale, timers)

        found = attempt(batches)
        with timers("optimizer"):
            self.fp8.advance()
            if found.losses.total is None:
                tokens = self.loads.update(found.tallies)
                return StepResult(found.losses, 0.0, lr, scale, True, skipping=skipping, tokens=tokens)
            if judge is not None:
                judgement = judge(found, attempt)
                found = judgement.attempt
                if judgement.hold:
                    norm = found.grad_norm
                    return StepResult(found.losses, norm, lr, scale, True, skipping=skipping, held=True)
            tokens = self.loads.update(found.tallies)
            if before_update is not None:
                before_update()
            sound = math.isfinite(found.losses.trained_total) or self.context.device.type == "meta"
            norm = found.sums_norm if sound else math.nan
            decay = self.schedules.weight_decay.at(progress)
            report = self.optimizer.step(lr, decay, 1.0 / scale, norm)
            self.scaler_state = self.scaler.update(self.scaler_state, not report.applied)
        return StepResult(
            found.losses,
            report.grad_norm,
            lr,
            scale,
            not report.applied,
            report.first_bad_parameter,
            skipping,
            tokens,
        )

    def _attempt(
        self, batches: Sequence[MicroBatch], skipping: Skipping, scale: float, timers: Timers
    ) -> Attempt:
        """Forward and backward of a global batch, its losses, and the norm of its gradient."""
        self._prints.clear()
        with timers("forward-backward"):
            if skipping is not NOTHING_SKIPPED:
                batches = [replace(batch, skipping=skipping) for batch in batches]
            counts = local_counts(self.executor.terms, batches, self.context.device)
            self.context.batch.all_reduce(counts).wait()
            # Everything that counts weighs the same, on whichever rank and micro-batch it fell.
            factors = loss_factors(self.executor.terms, counts, scale)
            program, step = self.programs.train(len(batches)), self.optimizer.updates
            sums = self.executor.train(program, batches, factors, step)
        with timers("optimizer"):
            local = sums.terms.clone()
            losses, _ = self._losses(sums.terms, counts)
            norm = 0.0 if losses.total is None else self.optimizer.grad_norm()
        return Attempt(losses, norm, norm * (1.0 / scale), local, tuple(self._prints), sums.tallies)

    def evaluate(self, global_batches: Iterable[Sequence[MicroBatch]]) -> tuple[Losses, int]:
        """The losses of all batches of all ranks, and how much counts for the first term.

        Args:
            global_batches: this rank's micro-batches of each.
        """
        terms, device = self.executor.terms, self.context.device
        sums, counts = torch.zeros(2, len(terms), dtype=torch.float64, device=device).unbind()
        for batches in global_batches:
            counts += local_counts(terms, batches, device)
            sums += self.executor.evaluate(self.programs.evaluate(len(batches)), batches).terms
        self.context.batch.all_reduce(counts).wait()
        losses, counted = self._losses(sums, counts)
        return losses.evaluated(), counted

    def _losses(self, sums: Tensor, counts: Tensor) -> tuple[Losses, int]:
        """From this rank's sums and everyone's counts, both float64 [terms]. Waits for the device.

        On the meta device the losses are NaN, and something counts.
        """
        self.context.pp.all_reduce(sums).wait()  # zeros on the stages that add nothing
        self.context.batch.all_reduce(sums).wait()
        if self.context.tp.size > 1:  # what all ranks decide on must be the same to the last bit
            self.context.tp.broadcast(sums, 0).wait()
        terms = self.executor.terms
        values = read_values(torch.cat([sums, counts])) or [math.nan] * len(terms) + [1.0] * len(terms)
        totals, divisors = values[: len(terms)], values[len(terms) :]
        return Losses.of(terms, totals, divisors), round(divisors[0])
