"""An engine's training step: forward, backward and step over the micro-batches of an accumulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megazero.deepspeed.answers import OptimizerAnswers, PlaceAnswers, SettingsAnswers
from megazero.deepspeed.data import RepeatingLoader, as_arguments, loss_of, to_half
from megazero.deepspeed.optimizer import DeepSpeedOptimizer
from megazero.deepspeed.report import Reporter, StepFacts
from megazero.deepspeed.settings import UserSettings
from megazero.errors import DataError, MegazeroError
from megazero.mpu.context import ParallelContext


@dataclass(frozen=True)
class EngineCounters:
    """How far an engine has come; checkpoints store this. See `SteppingEngine` for the meaning."""

    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int


class SteppingEngine(SettingsAnswers, OptimizerAnswers, PlaceAnswers, nn.Module):
    """A module of any kind that takes optimizer steps; `DeepSpeedEngine` adds checkpoints.

    Each `backward` adds to the gradients, and `step` updates at the last micro-batch of an accumulation. The
    gradients of a step are the mean over micro-batches and data-parallel ranks of those of each `loss`.

    Attributes of the module can be read through the engine.

    Attributes:
        module: the model.
        optimizer: see `DeepSpeedOptimizer`.
        lr_scheduler: stepped after each update; may be None.
        global_steps: optimizer steps so far, skipped ones included.
        global_samples: samples so far, over all ranks.
        micro_steps: calls of `step` so far.
        skipped_steps: steps without an update, because a gradient was not finite.

    Args:
        model: the model, its parameters already in the optimizer's buckets.
        optimizer: the model's optimizer.
        settings: batch sizes and what is reported.
        context: this rank's place in the job.
        lr_scheduler: anything with `step`.
        reporter: reports each step.
        dataloader: the loader of `training_data`, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: DeepSpeedOptimizer,
        settings: UserSettings,
        context: ParallelContext,
        lr_scheduler: Any,
        reporter: Reporter,
        dataloader: DataLoader[Any] | None,
    ):
        super().__init__()
        self.module = model
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.settings, self.context = settings, context
        self.training_dataloader = dataloader
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._reporter = reporter
        self._boundary: bool | None = None
        self._sync = True
        self._backwards = 0
        self._losses: list[Tensor] = []
        self._applied = False
        self._batches: Iterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; with `fp16.auto_cast`, inputs are cast to fp16.

        With a curriculum, the module is told in training how many tokens of its batch to use, as
        ``curriculum_seqlen``; the number is that of the step in progress, counted from 1.
        """
        if self.settings.seqlen is not None and self.module.training:
            kwargs = {**kwargs, "curriculum_seqlen": self.settings.seqlen.at(self.global_steps + 1)}
        if self.settings.extras.auto_cast:
            args, kwargs = to_half(args), to_half(kwargs)
        with self._reporter.timers("forward"), self._reporter.counting():
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradients of a mean loss to the step's; every rank calls this.

        Args:
            loss: the scalar loss of this rank's micro-batch.
            retain_graph: as in torch.
            scale_wrt_gas: divide by the accumulation steps.

        Returns:
            The loss as it counts: divided by the accumulation steps.

        Raises:
            MegazeroError: `loss` is not a scalar that gradients can be taken of.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            shown = type(loss).__name__
            if isinstance(loss, Tensor):
                shown = (
                    f"of shape {tuple(loss.shape)}, {'with' if loss.requires_grad else 'without'} gradients"
                )
            raise MegazeroError(
                f"`loss` must be a scalar tensor that requires gradients, but is {shown}; pass what the "
                "model's forward computed"
            )
        parallel = self.optimizer.parallel
        self.optimizer.begin()
        counted = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        # If gradients are sharded, there is no room for whole sums, so each backward reduces.
        reduce = self._sync and (self.is_gradient_accumulation_boundary() or self.settings.zero.stage >= 2)
        overlap = self.settings.zero.overlap_grad_reduce
        with self._reporter.timers("backward"), self._reporter.counting():
            parallel.begin_backward(0, reduce=reduce and overlap)
            (counted.float() * self.optimizer.loss_factor).backward(retain_graph=retain_graph)
            parallel.end_backward()
            if reduce and not overlap:
                parallel.reduce(0)
        self._backwards += 1
        self._losses.append(loss.detach().float().reshape(()))
        return counted

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the last one of an accumulation, update. Every rank calls this.

        Args:
            lr_kwargs: arguments for the schedule's `step`.

        Raises:
            MegazeroError: there has been no backward since the last call, or this is within `no_sync`.
        """
        if not self._sync:
            raise MegazeroError("`step` must be called outside of `no_sync`, but is within; leave it first")
        if self._backwards == 0:
            raise MegazeroError("`step` must follow a backward, but there was none; call `engine.backward`")
        self._backwards = 0
        self._applied = False
        if self.is_gradient_accumulation_boundary():
            self._update(dict(lr_kwargs or {}))
        self.micro_steps += 1

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        scale, rates = self.optimizer.cur_scale, tuple(self.get_lr())
        with self._reporter.timers("step"):
            self.optimizer.step()
        self._applied = not self.optimizer.overflow
        self.skipped_steps += not self._applied
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        if (compression := self.module.__dict__.get("compression_scheduler")) is not None:
            compression.step(self.global_steps)
        self.global_samples += self.train_batch_size()
        if self._reporter.wants(self.global_steps):
            report = self.optimizer.report
            assert report is not None, "there has been a step"
            facts = StepFacts(
                self.global_steps,
                self.global_samples,
                self._mean_loss(self._losses),
                report.grad_norm,
                rates,
                scale,
                self.skipped_steps,
                self._applied,
            )
            self._reporter.step(facts)
        self._losses = []

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> float:
        """One optimizer step on the next micro-batches.

        Args:
            data_iter: yields the micro-batches; a mapping goes to the model by keyword, a tuple or list by
                position, anything else alone. The model returns the loss, or has it first or as `loss`. None
                takes them from `training_data`.

        Returns:
            Mean loss over micro-batches and data-parallel ranks.

        Raises:
            DataError: the iterator ended early.
        """
        losses = []
        for batch in self._take(data_iter):
            args, kwargs = as_arguments(batch, self.device)
            loss = loss_of(self(*args, **kwargs))
            self.backward(loss)
            self.step()
            losses.append(loss.detach().float().reshape(()))
        return self._mean_loss(losses)

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any]) -> float:
        """The mean loss over as many micro-batches as `train_batch` takes, without training.

        Raises:
            DataError: the iterator ended early.
        """
        was_training = self.module.training
        self.eval()
        losses = []
        try:
            for batch in self._take(data_iter):
                args, kwargs = as_arguments(batch, self.device)
                losses.append(loss_of(self(*args, **kwargs)).float().reshape(()))
        finally:
            self.train(was_training)
        return self._mean_loss(losses)

    def _take(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        """The micro-batches of one accumulation."""
        if data_iter is None:
            if self.training_dataloader is None:
                raise DataError("`data_iter` must be given if `initialize` was given no `training_data`")
            self._batches = self._batches or RepeatingLoader(self.training_dataloader)
            data_iter = self._batches
        count = self.gradient_accumulation_steps()
        for number in range(count):
            try:
                batch = next(data_iter)
            except StopIteration:
                raise DataError(
                    f"`data_iter` must give {count} micro-batches, but ended after {number}; wrap the loader "
                    "in `RepeatingLoader` or give it more data"
                ) from None
            yield batch

    def _mean_loss(self, losses: list[Tensor]) -> float:
        total = torch.stack(losses).mean()
        self.context.batch.all_reduce(total).wait()
        return float(total) / self.context.batch.size

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which no gradients are reduced; a later backward or step reduces them."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before an update."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide by hand, from now on, whether a micro-batch is the last one before an update."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients so far; every rank calls this."""
        self.optimizer.zero_grad()

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated the weights."""
        return self._applied

    def progress(self) -> EngineCounters:
        """The counters that a checkpoint stores."""
        return EngineCounters(self.global_steps, self.global_samples, self.micro_steps, self.skipped_steps)

    def resume(self, progress: EngineCounters) -> None:
        """Restore the counters, and drop the gradients of a step that had begun."""
        self.global_steps, self.global_samples = progress.global_steps, progress.global_samples
        self.micro_steps, self.skipped_steps = progress.micro_steps, progress.skipped_steps
        self._backwards, self._losses = 0, []
        self._reporter.restart(self.global_steps)
