"""One training step: micro-batches forward and backward, gradient sums, loss scale, update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.mpu import ParallelContext
from megazero.optim import LearningRate, LossScaler, Progress, WeightDecay
from megazero.pipeline import Executor, Program
from megazero.train.timers import Timers
from megazero.zero import Optimizer


@dataclass(frozen=True)
class Programs:
    """What this rank's stage does in a step of so many micro-batches: (their number) -> program."""

    train: Callable[[int], Program]
    evaluate: Callable[[int], Program]


@dataclass(frozen=True)
class StepResult:
    """What one training step did; the same on all ranks.

    Attributes:
        loss: mean loss over all counted positions of the global batch, in nats.
        grad_norm: global norm before clipping.
        learning_rate: that the update used.
        loss_scale: that backward used.
        skipped: whether the update was left out for gradients that are not finite.
        first_bad_parameter: the first of them, when skipped.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    first_bad_parameter: str | None = None


class Engine:
    """Trains a model step by step. Its state is the optimizer's and `scaler_state`.

    Args:
        executor: runs this rank's stage of the model.
        programs: what it runs.
        optimizer: updates the weights.
        scaler: decides the loss scale.
        schedules: learning rate and weight decay over the training.
        context: for averaging over the ranks that read other samples.
    """

    def __init__(
        self,
        executor: Executor,
        programs: Programs,
        optimizer: Optimizer,
        scaler: LossScaler,
        schedules: tuple[LearningRate, WeightDecay],
        context: ParallelContext,
    ):
        self.executor = executor
        self.programs = programs
        self.optimizer = optimizer
        self.scaler = scaler
        self.scaler_state = scaler.initial()
        self.learning_rate, self.weight_decay = schedules
        self.context = context

    def train_step(
        self,
        batches: Sequence,
        nominal_tokens: int,
        progress: Progress,
        timers: Timers,
        before_update: Callable[[], None] | None = None,
    ) -> StepResult:
        """Train on one global batch.

        Args:
            batches: this rank's micro-batches.
            nominal_tokens: positions of the whole global batch, before any mask.
            progress: where the training stands before this step; schedules read it.
            timers: collects how long each phase takes.
            before_update: called when the state is about to change.
        """
        scale = self.scaler_state.scale
        with timers("forward-backward"):
            totals = self.executor.train(self.programs.train(len(batches)), batches, scale / nominal_tokens)
        with timers("optimizer"):
            loss_sum, tokens = self._everywhere(totals)
            # Every counted position weighs the same, on whichever rank and micro-batch it fell.
            average = nominal_tokens / tokens if tokens else 0.0
            lr = self.learning_rate.at(progress)
            if before_update is not None:
                before_update()
            report = self.optimizer.step(lr, self.weight_decay.at(progress), average / scale)
            self.scaler_state = self.scaler.update(self.scaler_state, not report.applied)
        return StepResult(
            loss=loss_sum / tokens if tokens else 0.0,
            grad_norm=report.grad_norm,
            learning_rate=lr,
            loss_scale=scale,
            skipped=not report.applied,
            first_bad_parameter=report.first_bad_parameter,
        )

    def evaluate(self, global_batches: Iterable[Sequence]) -> tuple[float, int]:
        """Mean loss over all counted positions of all ranks, in nats, and their number.

        Args:
            global_batches: this rank's micro-batches of each.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self.context.device)
        for batches in global_batches:
            totals += self.executor.evaluate(self.programs.evaluate(len(batches)), batches)
        loss_sum, tokens = self._everywhere(totals)
        return (loss_sum / tokens if tokens else 0.0), round(tokens)

    def _everywhere(self, totals: Tensor) -> tuple[float, float]:
        """Sums over the stages, of which the last has them, and over the ranks with other samples."""
        self.context.pp.all_reduce(totals).wait()
        self.context.data.all_reduce(totals).wait()
        loss_sum, tokens = totals.tolist()
        return loss_sum, tokens
