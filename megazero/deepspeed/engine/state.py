"""The state that an engine's parts share: its settings, its optimizer, and its counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megazero.deepspeed.checkpoint.saved import EngineCounters
from megazero.deepspeed.config.settings import UserSettings
from megazero.deepspeed.engine.report import Reporter
from megazero.deepspeed.models.random_ltd import scheduler_of
from megazero.deepspeed.optimizers.optimizer import DeepSpeedOptimizer
from megazero.mpu.context import ParallelContext


@dataclass(frozen=True)
class Given:
    """The arguments that a script gave to `initialize`; an engine shows it under DeepSpeed's names.

    Attributes:
        config: the JSON's content.
        optimizer: the optimizer, a function that makes one, or None.
        lr_scheduler: the schedule, a function that makes one, or None.
        mpu: the object that knows the layout, or None.
        training_data: the dataset, or None.
        collate_fn: collates its samples, or None.
    """

    config: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    lr_scheduler: Any = None
    mpu: Any = None
    training_data: Any = None
    collate_fn: Any = None


class EngineState:
    """The state that an engine's parts share.

    Attributes:
        module: the model.
        states: its optimizer, or one that only holds the weights.
        settings: batch sizes and what is reported.
        context: this rank's place in the job.
        lr_scheduler: stepped after each update; may be None.
        reporter: reports each step.
        given: what the script gave.
        random_ltd_scheduler: says how many tokens layers keep; None without random-LTD.
        global_steps: optimizer steps so far, skipped ones included.
        global_samples: samples so far, over all ranks.
        micro_steps: calls of `step` so far.
        skipped_steps: steps without an update, because a gradient was not finite.
        backwards: backwards since the last `step`.
        losses: this rank's losses since the last update.
        losses_are_means: whether they are means over all ranks already.
    """

    def __init__(
        self,
        module: nn.Module,
        states: DeepSpeedOptimizer,
        settings: UserSettings,
        context: ParallelContext,
        lr_scheduler: Any,
        reporter: Reporter,
        given: Given,
    ):
        self.module, self.states, self.settings, self.context = module, states, settings, context
        self.lr_scheduler, self.reporter, self.given = lr_scheduler, reporter, given
        self.random_ltd_scheduler = scheduler_of(given.config, settings.batch.train)
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.backwards = 0
        self.losses: list[Tensor] = []
        self.losses_are_means = False

    def forget(self) -> None:
        """Forget the backwards and losses of a step that had begun."""
        self.backwards, self.losses = 0, []

    def mean_loss(self, losses: list[Tensor]) -> float:
        """The mean of losses over micro-batches and data-parallel ranks; every rank calls this."""
        if self.losses_are_means:
            return float(losses[0])
        total = torch.stack(losses).mean()
        self.context.batch.all_reduce(total).wait()
        return float(total) / self.context.batch.size

    def progress(self) -> EngineCounters:
        """The counters that a checkpoint stores."""
        return EngineCounters(self.global_steps, self.global_samples, self.micro_steps, self.skipped_steps)

    def resume(self, progress: EngineCounters) -> None:
        """Restore the counters, and drop the gradients of a step that had begun."""
        vars(self).update(vars(progress))
        self.forget()
        if self.random_ltd_scheduler is not None:
            self.random_ltd_scheduler.reset_to_init()
            self.random_ltd_scheduler.get_total_layer_tokens(self.global_steps)
        self.states.steps = self.global_steps
        self.reporter.restart(self.global_steps)
