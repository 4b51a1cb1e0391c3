"""The state that an engine's parts share: its settings, its optimizer, and its counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from megazero.deepspeed.checkpoint.saved import EngineCounters
from megazero.deepspeed.config.settings import UserSettings
from megazero.deepspeed.engine.data import Collate
from megazero.deepspeed.engine.report import Reporter
from megazero.deepspeed.models.random_ltd import scheduler_of
from megazero.deepspeed.optimizers.optimizer import DeepSpeedOptimizer, UserOptimizer
from megazero.mpu.context import ParallelContext


@dataclass(frozen=True)
class UserArguments:
    """Arguments of `initialize` that an engine keeps.

    Attributes:
        config: the content of the JSON.
        optimizer: the optimizer, a function that makes one, or None.
        lr_scheduler: the schedule, a function that makes one, or None.
        mpu: the object that describes the layout, see `find_context`; or None.
        training_data: the dataset, or None.
        collate_fn: collates its samples, or None.
    """

    config: dict[str, object] = field(default_factory=dict)
    optimizer: UserOptimizer | None = None
    lr_scheduler: object = None
    mpu: object = None
    training_data: Dataset[object] | None = None
    collate_fn: Collate | None = None


class EngineState:
    """The state that an engine's parts share.

    Attributes:
        module: the model.
        states: the optimizer over the model's shards; one without groups if the engine only evaluates.
        settings: the engine's settings, batch sizes among them.
        context: this rank's groups and device.
        lr_scheduler: the schedule, stepped after each update; may be None.
        reporter: reports each step.
        arguments: arguments of `initialize`.
        random_ltd_scheduler: sets how many tokens layers keep; None without random-LTD.
        global_steps: optimizer steps so far, skipped ones included.
        global_samples: samples so far, over all ranks.
        micro_steps: calls of `step` so far.
        skipped_steps: steps without an update, because a gradient was not finite.
        backwards: backwards since the last `step`.
        losses: this rank's losses since the last update.
        losses_are_means: whether the losses are already means over all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        states: DeepSpeedOptimizer,
        settings: UserSettings,
        context: ParallelContext,
        lr_scheduler: Any,
        reporter: Reporter,
        arguments: UserArguments,
    ):
        self.module, self.states, self.settings, self.context = module, states, settings, context
        self.lr_scheduler, self.reporter, self.arguments = lr_scheduler, reporter, arguments
        self.random_ltd_scheduler = scheduler_of(arguments.config, settings.batch.train)
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.backwards = 0
        self.losses: list[Tensor] = []
        self.losses_are_means = False

    def forget(self) -> None:
        """Forget the backwards and losses since the last update."""
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
        """Restore the counters of a checkpoint, and forget the step in progress."""
        vars(self).update(vars(progress))
        self.forget()
        if self.random_ltd_scheduler is not None:
            self.random_ltd_scheduler.reset_to_init()
            self.random_ltd_scheduler.get_total_layer_tokens(self.global_steps)
        if (compression := self.module.__dict__.get("compression_scheduler")) is not None:
            compression.step(self.global_steps)
        self.states.steps = self.global_steps
        self.reporter.restart(self.global_steps)
