"""An engine's training step: the update after the micro-batches of an accumulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from megazero.config.deepspeed.batch import BatchTriangle
from megazero.deepspeed.asserted import asserts
from megazero.deepspeed.backward import BackwardEngine
from megazero.deepspeed.counters import EngineCounters
from megazero.deepspeed.data import LoaderOptions, RepeatingLoader, as_arguments, build_dataloader, loss_of
from megazero.deepspeed.report import StepFacts
from megazero.errors import ConfigError, DataError, MegazeroError


class SteppingEngine(BackwardEngine):
    """A module of any kind that takes optimizer steps; `DeepSpeedEngine` adds checkpoints.

    `step` updates at the last micro-batch of an accumulation. Arguments are those of `BackwardEngine`.

    Attributes:
        global_steps: optimizer steps so far, skipped ones included.
        global_samples: samples so far, over all ranks.
        micro_steps: calls of `step` so far.
        skipped_steps: steps without an update, because a gradient was not finite.
        training_dataloader: the loader of `training_data`, or None.
        monitor: takes a script's own values.
        tput_timer: the samples per second so far.
        timers: what forward, backward and step took, with `wall_clock_breakdown`, under DeepSpeed's names.
        loaded_checkpoint_dp_world_size: the number of replicas that wrote the loaded checkpoint, if known.
        loaded_checkpoint_mp_world_size: the number of slices of each layer there, if known.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.monitor, self.tput_timer = self._reporter.monitor, self._reporter.throughput
        self.timers = self._reporter.clocks
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loaded_checkpoint_mp_world_size: int | None = None
        self.training_dataloader: DataLoader[Any] | None = None
        if self.given.training_data is not None:
            self.training_dataloader = self.deepspeed_io(self.given.training_data)
        self._applied = self._compiled = False
        self._batches: Iterator[Any] | None = None

    @asserts
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the last one of an accumulation, update. Every rank calls this.

        Args:
            lr_kwargs: arguments for the schedule's `step`.

        Raises:
            MegazeroError: there has been no backward since the last call, or this is within `no_sync`.
        """
        self._must_train("step")
        if not self._sync:
            raise MegazeroError("`step` must be called outside of `no_sync`, but is within; leave it first")
        if self._backwards == 0 and not self._adopt_gradients():
            raise MegazeroError("`step` must follow a backward, but there was none; call `engine.backward`")
        self._backwards = 0
        self._applied = False
        if self.is_gradient_accumulation_boundary():
            self._update(dict(lr_kwargs or {}))
        self.micro_steps += 1

    def _adopt_gradients(self) -> bool:
        """Take gradients that the script has set without a backward, at stage 0; whether there are any.

        Like those that a backward leaves, they are means over the accumulation, times the loss scale.
        """
        trained = (param for group in self.states.param_groups for param in group["params"])
        given = [param for param in trained if param.grad is not None]
        if self._shown is None or not given:
            return False
        self._begin(self.states.loss_factor / self.states.cur_scale)
        for param in given:
            self.states.parallel.collect(param)
        self._end()
        return True

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        scale, rates = self.states.cur_scale, tuple(self.get_lr())
        if self._shown is not None:
            self._shown.hide()
        self.states.begin()  # without gradients, if the script has dropped all of them since the backward
        with self._reporter.phase("step"):
            self.states.step()
        self.states.parallel.arrived.clear()
        self._applied = not self.states.overflow
        self.skipped_steps += not self._applied
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        if (compression := self.module.__dict__.get("compression_scheduler")) is not None:
            compression.step(self.global_steps)
        self.global_samples += self.train_batch_size()
        self.tput_timer.stop(global_step=True, report_speed=False)
        self.tput_timer.start()
        if self._reporter.wants(self.global_steps):
            report = self.states.report
            assert report is not None, "there has been a step"
            facts = StepFacts(
                self.progress(),
                self._mean_loss(self._losses) if self._losses else None,
                report.grad_norm,
                rates,
                scale,
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
        if self.random_ltd_scheduler is not None:
            self.random_ltd_scheduler.reset_to_init()
            self.random_ltd_scheduler.get_total_layer_tokens(self.global_steps)
        self.states.steps = self.global_steps
        self._reporter.restart(self.global_steps)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per update, samples per forward and rank, and forwards per update."""
        batch = self.settings.batch
        return batch.train, batch.micro, batch.accumulation

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module's forward with torch, when it first runs.

        Args:
            backend: as in `torch.compile`.
            compile_kwargs: further arguments of `torch.compile`.
            schedule: refused, with `compiled_autograd_enabled`: both belong to DeepCompile.

        Raises:
            ConfigError: one of these is given.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ConfigError(
                "`schedule` and `compiled_autograd_enabled` must be left out: they rewrite DeepSpeed's own "
                "gathers, which are not here, but are given; pass `backend` alone"
            )
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self._compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` has been called."""
        return self._compiled

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per update, by another number of accumulation steps.

        Raises:
            ConfigError: it is not a multiple of the micro-batches of all ranks.
        """
        batch, ranks = self.settings.batch, self.context.data.size
        steps, rest = divmod(train_batch_size, batch.micro * ranks)
        if rest or steps < 1:
            raise ConfigError(
                f"`train_batch_size` must be a multiple of {batch.micro} samples x {ranks} ranks, but is "
                f"{train_batch_size}; choose a multiple of {batch.micro * ranks}"
            )
        self._set_batch(BatchTriangle(train_batch_size, batch.micro, steps))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward and rank; the samples per update change with them.

        Raises:
            ConfigError: it is not positive.
        """
        if micro_batch_size < 1:
            raise ConfigError(f"`micro_batch_size` must be at least 1, but is {micro_batch_size}; raise it")
        steps = self.settings.batch.accumulation
        train = micro_batch_size * steps * self.context.data.size
        self._set_batch(BatchTriangle(train, micro_batch_size, steps))

    def _set_batch(self, batch: BatchTriangle) -> None:
        self.settings = replace(self.settings, batch=batch)
        self._reporter.settings = self.settings

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of this rank's micro-batches.

        Args:
            dataset: the samples of all ranks.
            batch_size: samples per batch; by default the micro-batch.
            route: ``train`` shuffles; ``eval`` and ``predict`` keep the order.
            pin_memory: copy batches to pinned memory, where there is a CUDA device.
            data_sampler: chooses this rank's samples.
            collate_fn: collates samples; by default the one given to `initialize`.
            num_local_io_workers: processes that load; by default this one does.

        Raises:
            ConfigError: there is no such `route`.
        """
        if route not in ("train", "eval", "predict"):
            raise ConfigError(f"`route` must be train, eval or predict, but is {route!r}; choose one")
        options = LoaderOptions(
            batch_size or self.settings.batch.micro,
            drop_last=self.settings.extras.dataloader_drop_last,
            shuffle=route == "train",
            sampler=data_sampler,
            pin_memory=pin_memory,
            workers=num_local_io_workers or 0,
        )
        return build_dataloader(dataset, collate_fn or self.given.collate_fn, options, self.context)
