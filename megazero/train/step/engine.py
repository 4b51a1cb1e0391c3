"""One training step: micro-batches forward and backward, gradient sums, loss scale, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.config.steps import Progress
from megazero.layers.fp8 import Fp8State
from megazero.layers.inputs import NOTHING_SKIPPED
from megazero.models.batch import MicroBatch
from megazero.moe.loads import RouterLoads
from megazero.optim.loss_scaler import LossScaler
from megazero.optim.schedule import UpdateSchedule
from megazero.pipeline.actions import Program
from megazero.pipeline.executor import Executor
from megazero.train.step.distillation import Distillation
from megazero.train.step.losses import Losses, Totals, local_counts, loss_factors
from megazero.train.step.skipping import SkippingPlan
from megazero.train.step.timers import Timers
from megazero.zero.bucket import Bucket
from megazero.zero.fingerprint import Fingerprints
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel


@dataclass(frozen=True)
class Programs:
    """The programs of this rank's stage: (number of micro-batches in a step) -> program."""

    train: Callable[[int], Program]
    evaluate: Callable[[int], Program]


@dataclass(frozen=True)
class Schedules:
    """The settings that change during training.

    Attributes:
        updates: learning rates and weight decay, which advance with each update.
        skipping: the tokens and layers to skip, which advance with each step.
    """

    updates: UpdateSchedule
    skipping: SkippingPlan


class Outcome(Enum):
    """Whether a step updated the weights, and if not, why."""

    UPDATED = "updated"
    EMPTY = "nothing in the global batch counted for a trained term"
    NOT_FINITE = "a number was not finite"
    HELD = "a guard held it"
    PASSED_OVER = "the step was not made"


@dataclass(frozen=True)
class StepResult:
    """The result of one training step, the same on all ranks.

    Attributes:
        losses: the losses of the global batch, by term.
        grad_norm: global norm before clipping; 0 if no token had a loss.
        learning_rate: the schedule's learning rate at this step.
        loss_scale: the loss scale of backward.
        outcome: whether the update was made, and if not, why.
        first_bad_parameter: the first parameter with a gradient that is not finite.
        tokens: name of a router's tally -> how often each expert was chosen, for routers of this stage, on
            the device.
    """

    losses: Losses
    grad_norm: float
    learning_rate: float
    loss_scale: float
    outcome: Outcome
    first_bad_parameter: str | None = None
    tokens: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def skipped(self) -> bool:
        """Whether no update was made."""
        return self.outcome is not Outcome.UPDATED


@dataclass(frozen=True)
class Attempt:
    """Forward and backward of a global batch, before its update.

    Attributes:
        scale: the loss scale of backward.
        totals: sums over the global batch; reading them waits for the device.
        local: this rank's own sums of the loss terms, float64 [terms], on the device.
        prints: (first parameter of a bucket, fingerprint of this rank's own gradients on the device), in the
            order of reductions; empty unless `Engine.witness` has been called.
        tallies: name -> this rank's sum of a tally, such as the counts of a router.
    """

    scale: float
    totals: Totals
    local: Tensor
    prints: Sequence[tuple[str, Tensor]] = ()
    tallies: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def losses(self) -> Losses:
        """The losses of the global batch."""
        return self.totals.losses

    @property
    def grad_norm(self) -> float:
        """Global norm of the gradient, before clipping."""
        return self.totals.norm * (1.0 / self.scale)


@dataclass(frozen=True)
class LayerState:
    """The state of layers that each step updates without gradients.

    Attributes:
        loads: the routers' loads and biases.
        fp8: the scales and amax histories of 8-bit products.
    """

    loads: RouterLoads
    fp8: Fp8State


class Evaluation(NamedTuple):
    """The result of an evaluation.

    Attributes:
        losses: the losses over the batches of all ranks.
        counted: the first term's count.
        outputs: for each global batch, number of a micro-batch -> its outputs, on the rank of the last chunk.
    """

    losses: Losses
    counted: int
    outputs: Sequence[Mapping[int, Mapping[str, Tensor]]]


class Engine:
    """Trains a model step by step. Its state is the optimizer's and `scaler_state`."""

    def __init__(
        self,
        executor: Executor[MicroBatch],
        programs: Programs,
        optimizer: Optimizer,
        scaler: LossScaler,
        schedules: Schedules,
        memory: LayerState,
        distillation: Distillation | None = None,
    ):
        self.executor = executor
        self.programs = programs
        self.optimizer = optimizer
        self.scaler = scaler
        self.scaler_state = scaler.initial()
        self.schedules = schedules
        self.loads = memory.loads
        self.fp8 = memory.fp8
        self.context = optimizer.context
        self.distillation = distillation or Distillation()
        self._prints: list[tuple[str, Tensor]] = []
        self._queued: Attempt | None = None

    def nothing(self, updated: Progress) -> StepResult:
        """The result of a step that is passed over, without losses and update."""
        terms = self.executor.terms
        losses = Losses.of(terms, [0.0] * len(terms), [0.0] * len(terms))
        lr = self.schedules.updates.learning_rate.at(updated)
        return StepResult(losses, 0.0, lr, self.scaler_state.scale, Outcome.PASSED_OVER)

    def witness(self, sharding: DataParallel) -> None:
        """From now on, compute fingerprints of gradients before `sharding` sums them over ranks."""
        fingerprints = Fingerprints(self.context.device)

        def note(bucket: Bucket, gradients: Tensor) -> None:
            self._prints.append((bucket.layout.specs[0].name, fingerprints.of(gradients)))

        sharding.observe(note)

    def train_step(self, batches: Sequence[MicroBatch], progress: Progress, timers: Timers) -> StepResult:
        """Train on one global batch: an attempt and its update. All steps before must have been updates."""
        attempt = self.attempt(batches, progress, timers)
        self.queue_update(attempt, progress)
        return self.update(attempt, progress, timers)

    def attempt(self, batches: Sequence[MicroBatch], progress: Progress, timers: Timers) -> Attempt:
        """Run forward and backward of a global batch, and sum its losses and squared gradients.

        It changes nothing except the gradients, which replace those of an earlier attempt.

        Args:
            batches: this rank's micro-batches, before any skipping.
            progress: the progress before this step, which decides what to skip.
        """
        self.distillation.before(progress)
        self._prints.clear()
        scale, skipping = self.scaler_state.scale, self.schedules.skipping.at(progress)
        with timers("forward-backward"):
            if skipping is not NOTHING_SKIPPED:
                batches = [replace(batch, skipping=skipping) for batch in batches]
            counts = local_counts(self.executor.terms, batches, self.context)
            self.context.batch.all_reduce(counts).wait()
            # Divisors are those of the global batch, so every token weighs the same on any rank.
            factors = loss_factors(self.executor.terms, counts, scale)
            program, step = self.programs.train(len(batches)), self.optimizer.updates
            with self.fp8.passes():
                sums = self.executor.train(program, batches, factors, step)
        with timers("optimizer"):
            local = sums.terms.clone()
            self._sum_over_ranks(sums.terms)
            totals = Totals(self.executor.terms, sums.terms, counts, self.optimizer.grad_squares())
        return Attempt(scale, totals, local, tuple(self._prints), sums.tallies)

    def queue_update(self, attempt: Attempt, updated: Progress) -> None:
        """Queue the update of the latest attempt, if the device can decide whether to apply it.

        The host then reads losses and norm while the device updates the weights, instead of making it wait.
        Call this only if no guard may hold the update.
        """
        if not self.optimizer.queues:
            return
        schedule = self.schedules.updates
        rates, decay = schedule.rates(updated), schedule.weight_decay.at(updated)
        self.optimizer.queue(rates, decay, 1.0 / attempt.scale, attempt.totals.norm_on_device())
        self._queued = attempt

    def update(
        self, attempt: Attempt, updated: Progress, timers: Timers, *, hold: bool = False
    ) -> StepResult:
        """Update the weights with the gradients of the latest attempt.

        If no token of the global batch has a loss, only routers and the scales of 8-bit products are updated,
        not even the loss scale.

        Args:
            updated: the progress counted in updates, by which learning rate and weight decay are scheduled.
            hold: whether to skip the update, that of routers included.
        """
        losses, scale, queued = attempt.losses, attempt.scale, self._queued is attempt
        self._queued = None
        schedule = self.schedules.updates
        lr = schedule.learning_rate.at(updated)
        with timers("optimizer"):
            self.fp8.advance()
            if losses.total is None:
                tokens = self.loads.update(attempt.tallies)
                return StepResult(losses, 0.0, lr, scale, Outcome.EMPTY, tokens=tokens)
            if hold:
                assert not queued, "an update that is queued cannot be held"
                return StepResult(losses, attempt.grad_norm, lr, scale, Outcome.HELD)
            tokens = self.loads.update(attempt.tallies)
            sound = math.isfinite(losses.trained_total) or self.context.device.type == "meta"
            norm = attempt.totals.norm if sound else math.nan
            rates, decay = schedule.rates(updated), schedule.weight_decay.at(updated)
            report = self.optimizer.step(rates, decay, 1.0 / scale, norm, queued=queued)
            self.scaler_state = self.scaler.update(self.scaler_state, not report.applied)
        outcome = Outcome.UPDATED if report.applied else Outcome.NOT_FINITE
        return StepResult(losses, report.grad_norm, lr, scale, outcome, report.first_bad_parameter, tokens)

    def evaluate(self, global_batches: Iterable[Sequence[MicroBatch]]) -> Evaluation:
        """Compute the losses over the batches of all ranks, and the outputs of this rank's batches.

        Args:
            global_batches: this rank's micro-batches of each global batch.
        """
        terms, device = self.executor.terms, self.context.device
        sums, counts = torch.zeros(2, len(terms), dtype=torch.float64, device=device).unbind()
        outputs = []
        for batches in global_batches:
            counts += local_counts(terms, batches, self.context)
            step = self.executor.evaluate(self.programs.evaluate(len(batches)), batches)
            sums += step.terms
            outputs.append(step.outputs)
        self.context.batch.all_reduce(counts).wait()
        self._sum_over_ranks(sums)
        totals = Totals(terms, sums, counts)
        return Evaluation(totals.losses.evaluated(), totals.counted, outputs)

    def _sum_over_ranks(self, sums: Tensor) -> None:
        """Sum this rank's loss terms, float64 [terms], over all ranks, in place."""
        self.context.pp.all_reduce(sums).wait()  # stages without a loss have zeros
        self.context.batch.all_reduce(sums).wait()
        if self.context.tp.size > 1:  # ranks decide by these numbers, so every bit must be the same
            self.context.tp.broadcast(sums, 0).wait()
