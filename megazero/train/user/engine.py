"""The engine that `megazero.initialize` returns: a module whose backward and step are ours.

Members bear DeepSpeed's names and do what they do there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megazero.errors import DataError, MegazeroError
from megazero.mpu import Launch, ParallelContext, leave
from megazero.train.user.checkpoint import (
    LoadParts,
    Progress,
    load_checkpoint,
    module_state,
    save_checkpoint,
    save_module,
)
from megazero.train.user.config import UserSettings
from megazero.train.user.data import RepeatingLoader, as_arguments, loss_of, to_half
from megazero.train.user.optimizer import UserOptimizer
from megazero.train.user.report import Reporter, StepFacts


class UserEngine(nn.Module):
    """Wraps a module of any kind: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    Each `backward` adds to the gradients, and `step` updates at the last micro-batch of an accumulation. The
    gradients of a step are the mean over micro-batches and data-parallel ranks of those of each `loss`.

    Attributes of the module can be read through the engine.

    Attributes:
        module: the model.
        optimizer: see `UserOptimizer`.
        lr_scheduler: stepped after each update; None for none.
        global_steps: optimizer steps so far, skipped ones included.
        global_samples: samples so far, over all ranks.
        micro_steps: calls of `step` so far.
        skipped_steps: steps without an update, because a gradient was not finite.

    Args:
        model: prepared, its parameters in the optimizer's buckets.
        optimizer: of the model.
        settings: batch sizes and what is reported.
        context: this rank.
        lr_scheduler: anything with `step`.
        reporter: told of each step.
        dataloader: that of `training_data`, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: UserOptimizer,
        settings: UserSettings,
        context: ParallelContext,
        lr_scheduler: Any,
        reporter: Reporter,
        dataloader: DataLoader | None,
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
        self._batches: Iterator | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; with `fp16.auto_cast`, of inputs in fp16."""
        if self.settings.extras.auto_cast:
            args, kwargs = to_half(args), to_half(kwargs)
        with self._reporter.timers("forward"), self._reporter.counting():
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradients of a mean loss to the step's; every rank calls this.

        Args:
            loss: scalar, of this rank's micro-batch.
            retain_graph: as torch has it.
            scale_wrt_gas: divide by the accumulation steps.

        Returns:
            The loss that counts: divided by the accumulation steps.

        Raises:
            MegazeroError: `loss` is no scalar that gradients can be taken of.
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
        # Where gradients are cut there is no room for whole sums, so each backward reduces.
        reduce = self._sync and (self.is_gradient_accumulation_boundary() or self.settings.zero.stage >= 2)
        with self._reporter.timers("backward"), self._reporter.counting():
            parallel.begin_backward(0, reduce=reduce)
            (counted.float() * self.optimizer.loss_factor).backward(retain_graph=retain_graph)
            parallel.end_backward()
        self._backwards += 1
        self._losses.append(loss.detach().float().reshape(()))
        return counted

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the last one of an accumulation, update. Every rank calls this.

        Args:
            lr_kwargs: arguments of the schedule's `step`.

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
        self.global_samples += self.train_batch_size()
        if self._reporter.wants(self.global_steps):
            facts = StepFacts(
                self.global_steps,
                self.global_samples,
                self._mean_loss(self._losses),
                self.get_global_grad_norm(),
                rates,
                scale,
                self.skipped_steps,
                self._applied,
            )
            self._reporter.step(facts)
        self._losses = []

    def train_batch(self, data_iter: Iterator | None = None) -> float:
        """One optimizer step on the next micro-batches.

        Args:
            data_iter: gives them; a mapping goes to the model by keyword, a tuple or list by position,
                anything else alone. The model returns the loss, or has it first or as `loss`.
                None: from `training_data`.

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
    def eval_batch(self, data_iter: Iterator) -> float:
        """Mean loss of as many micro-batches as `train_batch` takes, without training.

        Raises:
            DataError: the iterator ended early.
        """
        was_training = self.module.training
        self.eval()
        losses = []
        for batch in self._take(data_iter):
            args, kwargs = as_arguments(batch, self.device)
            losses.append(loss_of(self(*args, **kwargs)).float().reshape(()))
        self.train(was_training)
        return self._mean_loss(losses)

    def _take(self, data_iter: Iterator | None) -> Iterator[Any]:
        """The micro-batches of one accumulation."""
        if data_iter is None:
            if self.training_dataloader is None:
                raise DataError("`data_iter` must be given where `initialize` got no `training_data`")
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
        self.context.data.all_reduce(total).wait()
        return float(total) / self.context.data.size

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it no gradients are reduced; a later backward or step does it."""
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
        """Say so by hand from now on."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients so far; every rank calls this."""
        self.optimizer.zero_grad()

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated the weights."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the last update over all ranks, before clipping."""
        return None if self.optimizer.report is None else self.optimizer.report.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def train_batch_size(self) -> int:
        """Samples of one update over all ranks."""
        return self.settings.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward on one rank."""
        return self.settings.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one update."""
        return self.settings.batch.accumulation

    def gradient_clipping(self) -> float:
        """Largest gradient norm; 0 is off."""
        return self.settings.clip_grad

    def zero_optimization_stage(self) -> int:
        """What is cut over the ranks: nothing, the optimizer, gradients, parameters."""
        return self.settings.zero.stage

    def zero_optimization(self) -> bool:
        """Whether anything is."""
        return self.settings.zero.stage > 0

    def fp16_enabled(self) -> bool:
        """Whether weights are fp16."""
        return self.settings.precision.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bf16."""
        return self.settings.precision.dtype == "bf16"

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return self.optimizer.cur_scale

    def loss_scale(self) -> float:
        """The loss scale."""
        return self.optimizer.cur_scale

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return self.context.device

    @property
    def local_rank(self) -> int:
        """Number of this rank on its node, as the launcher says."""
        return Launch.from_environment().local_rank

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.context.world_size

    @property
    def dp_world_size(self) -> int:
        """Ranks that samples are dealt to."""
        return self.context.data.size

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write everything that continuing needs to ``save_dir/tag``; every rank calls this.

        Args:
            save_dir: a folder that every rank sees.
            tag: default: ``global_step`` and the number of steps.
            client_state: plain values and tensors of the script's own.
            save_latest: name it in ``save_dir/latest``, which `load_checkpoint` reads.

        Raises:
            CheckpointError: it cannot be written, or `client_state` holds what is no plain value.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        save_checkpoint(self, Path(save_dir), tag, dict(client_state or {}), save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from what `save_checkpoint` wrote, on any number of replicas and at any stage.

        Args:
            load_dir: as given to `save_checkpoint`.
            tag: default: what ``latest`` names; without that file nothing is loaded.
            load_module_strict: refuse a checkpoint that lacks weights of this module.
            load_optimizer_states: False leaves moments, loss scale and parameter groups as they are.
            load_lr_scheduler_states: False leaves the schedule as it is.
            load_module_only: load weights and buffers alone.

        Returns:
            The checkpoint's folder and the `client_state`; None and None where there is none.

        Raises:
            CheckpointError: it is missing, damaged, or of another model or optimizer.
        """
        whole = not load_module_only
        parts = LoadParts(
            load_module_strict, load_optimizer_states and whole, load_lr_scheduler_states and whole, whole
        )
        return load_checkpoint(self, Path(load_dir), tag, parts)

    def progress(self) -> Progress:
        """The counters that a checkpoint keeps."""
        return Progress(self.global_steps, self.global_samples, self.micro_steps, self.skipped_steps)

    def resume(self, progress: Progress) -> None:
        """Take the counters over, and drop gradients of a step that had begun."""
        self.global_steps, self.global_samples = progress.global_steps, progress.global_samples
        self.micro_steps, self.skipped_steps = progress.micro_steps, progress.skipped_steps
        self._backwards, self._losses = 0, []
        self._reporter.restart(self.global_steps)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The module's weights and buffers, whole, on the CPU; every rank calls this."""
        return module_state(self, exclude_frozen_parameters)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `module_state_dict` for use elsewhere; every rank calls this.

        Args:
            save_dir: made where it does not exist.
            save_filename: ``.safetensors`` chooses that format, anything else torch's.
            exclude_frozen_parameters: leave these out.

        Returns:
            False, and nothing is written, at stage 3 without `stage3_gather_16bit_weights_on_model_save`.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self.zero_optimization_stage() == 3 and not self.settings.extras.gather_16bit_weights_on_save:
            return False
        save_module(self, Path(save_dir) / save_filename, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def destroy(self) -> None:
        """End the job in good order: close monitors, wait for the other ranks and leave the world."""
        self._reporter.close()
        leave(self.context)
