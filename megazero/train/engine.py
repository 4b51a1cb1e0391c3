"""One training step: micro-batches forward and backward, gradient sums, loss scale, update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megazero.mpu import ParallelContext
from megazero.optim import LearningRate, LossScaler, Progress, WeightDecay
from megazero.train.timers import Timers
from megazero.zero import GradientReducer, Optimizer


class LossModel(Protocol):
    """What the engine trains: anything with a summed loss over a micro-batch."""

    def loss(self, batch: object) -> tuple[Tensor, Tensor]:
        """Sum of the losses of the positions that count, and how many count; float32 scalars."""


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
    """Trains `model` step by step. Its state is the optimizer's and `scaler_state`.

    Args:
        model: computes losses.
        reducer: collects the gradients.
        optimizer: updates the weights.
        scaler: decides the loss scale.
        schedules: learning rate and weight decay over the training.
        context: for averaging over the ranks that read other samples.
    """

    def __init__(
        self,
        model: LossModel,
        reducer: GradientReducer,
        optimizer: Optimizer,
        scaler: LossScaler,
        schedules: tuple[LearningRate, WeightDecay],
        context: ParallelContext,
    ):
        self.model = model
        self.reducer = reducer
        self.optimizer = optimizer
        self.scaler = scaler
        self.scaler_state = scaler.initial()
        self.learning_rate, self.weight_decay = schedules
        self.context = context

    def train_step(
        self, batches: Sequence, nominal_tokens: int, progress: Progress, timers: Timers
    ) -> StepResult:
        """Train on one global batch.

        Args:
            batches: this rank's micro-batches.
            nominal_tokens: positions of the whole global batch, before any mask.
            progress: where the training stands before this step; schedules read it.
            timers: collects how long each phase takes.
        """
        scale = self.scaler_state.scale
        with timers("forward-backward"):
            totals = self._accumulate(batches, scale / nominal_tokens)
        with timers("optimizer"):
            self.context.data.all_reduce(totals).wait()
            loss_sum, tokens = totals.tolist()
            # Every counted position weighs the same, on whichever rank and micro-batch it fell.
            average = nominal_tokens / tokens if tokens else 0.0
            lr = self.learning_rate.at(progress)
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

    def _accumulate(self, batches: Sequence, factor: float) -> Tensor:
        """Sum gradients over micro-batches and ranks; returns [loss sum, counted positions] of this rank."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.context.device)
        self.reducer.start()
        for i, batch in enumerate(batches):
            loss, tokens = self.model.loss(batch)
            if i == len(batches) - 1:
                self.reducer.last_backward()
            (loss * factor).backward()
            totals += torch.stack([loss.detach(), tokens]).double()
        self.reducer.finish()
        return totals

    @torch.no_grad()
    def evaluate(self, batches: Iterable) -> tuple[float, int]:
        """Mean loss over all counted positions of `batches` on all ranks, in nats, and their number."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.context.device)
        for batch in batches:
            totals += torch.stack(self.model.loss(batch)).double()
        self.context.data.all_reduce(totals).wait()
        loss_sum, tokens = totals.tolist()
        return (loss_sum / tokens if tokens else 0.0), round(tokens)
