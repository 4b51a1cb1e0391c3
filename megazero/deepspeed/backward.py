"""An engine's forwards and backwards: scaled, divided by the accumulation, reduced when they should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megazero.deepspeed.answers import (
    Given,
    LayoutAnswers,
    OptimizerAnswers,
    PlaceAnswers,
    SettingsAnswers,
)
from megazero.deepspeed.autocast import Autocast
from megazero.deepspeed.config.settings import UserSettings
from megazero.deepspeed.curriculum import ScriptLengths
from megazero.deepspeed.data import to_half
from megazero.deepspeed.getters import ATTRIBUTES, GETTERS
from megazero.deepspeed.optimizer import DeepSpeedOptimizer
from megazero.deepspeed.random_ltd import initialize_layers, scheduler_of
from megazero.deepspeed.report import Reporter
from megazero.deepspeed.script_backward import ScriptBackward, ShownGradients
from megazero.errors import ConfigError, MegazeroError
from megazero.mpu.context import ParallelContext


class BackwardEngine(SettingsAnswers, OptimizerAnswers, PlaceAnswers, LayoutAnswers, nn.Module):
    """A module of any kind with forward and backward; `SteppingEngine` adds the update.

    Each backward adds to the gradients, whether `backward` runs it or the script does with
    ``loss.backward()``. The gradients of a step are the mean over micro-batches and data-parallel ranks.

    Attributes of the module can be read through the engine.

    Attributes:
        module: the model.
        optimizer: see `DeepSpeedOptimizer`; if the engine has none to train with, a `DeepSpeedZeRoOffload` at
            stage 3, and None otherwise.
        states: the same, or one that only holds the weights.
        lr_scheduler: stepped after each update; may be None.
        random_ltd_scheduler: says how many tokens layers keep; None without random-LTD.

    Args:
        model: the model, its parameters already in the optimizer's buckets.
        states: the model's optimizer.
        settings: batch sizes and what is reported.
        context: this rank's place in the job.
        lr_scheduler: anything with `step`.
        reporter: reports each step.
        given: what the script gave.
    """

    global_steps: int
    micro_steps: int

    def __init__(
        self,
        model: nn.Module,
        states: DeepSpeedOptimizer,
        settings: UserSettings,
        context: ParallelContext,
        lr_scheduler: Any,
        reporter: Reporter,
        given: Given,
    ):
        super().__init__()
        self.module = model
        self.states = states
        self.optimizer = states.offload if states.idle else states
        self.lr_scheduler = lr_scheduler
        self.settings, self.context, self.given = settings, context, given
        self._reporter, self._autocast = reporter, Autocast.of(settings)
        self.random_ltd_scheduler = scheduler_of(given.config, settings.batch.train)
        self._boundary: bool | None = None
        self._sync, self._together = True, False
        self._reduces = self._scaled = False
        self._backwards = 0
        self._losses: list[Tensor] = []
        parallel = states.parallel
        self._shown = ShownGradients(parallel, states.share) if states.shows_gradients else None
        self._script = ScriptBackward(parallel, self._begin_script, self._end, self._shown)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in GETTERS:
                return partial(GETTERS[name], self)
            if name in ATTRIBUTES:
                return ATTRIBUTES[name](self)
            module = self.__dict__.get("_modules", {}).get("module")
            if hasattr(module, name) or hasattr(type(module), name):
                return getattr(module, name)
            words = f"'{type(self).__name__}' object has no attribute '{name}'"
            raise AttributeError(words, name=name, obj=self) from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; with `fp16.auto_cast`, inputs are cast to fp16.

        With a curriculum, the module is told in training how many tokens of its batch to use, as
        ``curriculum_seqlen``; the number is that of the step in progress, counted from 1. With progressive
        layer dropping, it is told the share of layers to keep, as ``pld_theta``.
        """
        self._must_be_current("forward")
        if self._script.recover():
            self._drop()
        if self.settings.seqlen is not None and self.module.training:
            kwargs = {**kwargs, "curriculum_seqlen": self.settings.seqlen.at(self.global_steps + 1)}
        if self.settings.layer_drop is not None and self.module.training:
            kwargs = {**kwargs, **self.settings.layer_drop.arguments(self.global_steps)}
        if self.random_ltd_scheduler is not None and self.module.training:
            self.random_ltd_scheduler.update_seq(self.global_steps)
        if self.settings.extras.auto_cast:
            args, kwargs = to_half(args), to_half(kwargs)
        explaining, cast = self.states.parallel.order.explaining, self._autocast.around(self.context.device)
        reporter, step = self._reporter, self.global_steps + 1
        profiling = reporter.profiling(self.module, step) if self.module.training else nullcontext()
        with reporter.phase("forward"), reporter.counting(), profiling, explaining(), cast:
            output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._script.watch(output)
        return output

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradients of a mean loss to the step's; every rank calls this.

        Args:
            loss: the scalar loss of this rank's micro-batch.
            retain_graph: as in torch.
            scale_wrt_gas: divide by the accumulation steps.

        Returns:
            The loss as it counts: divided by the accumulation steps.

        Raises:
            MegazeroError: `loss` is not a scalar that gradients can be taken of, or the engine cannot train.
        """
        self._must_train("backward")
        _must_be_loss(loss)
        if self._script.recover():
            self._drop()
        counted = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        scale, arriving = self.states.loss_factor, 1.0
        if self.settings.precision.dtype == "fp16":  # what a rank's gradient may be is the same on any number
            scale, arriving = self.states.cur_scale, self.states.loss_factor / self.states.cur_scale
        with self._reporter.phase("backward"), self._reporter.counting():
            if self._shown is not None:
                self._shown.hide()
            self._begin(arriving)
            try:
                (counted.float() * scale).backward(retain_graph=retain_graph)
            except BaseException:
                self._drop()
                raise
            self._end()
        self._losses.append(loss.detach().float().reshape(()))
        return counted

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a script that runs ``engine.scale(loss).backward()``.

        Raises:
            MegazeroError: `loss` is not a scalar that gradients can be taken of, or the engine cannot train.
        """
        self._must_train("scale")
        _must_be_loss(loss)
        value = loss.detach().float().reshape(())

        def arrives(grad: Tensor) -> None:
            self._scaled = True
            self._losses.append(value)

        scaled = loss.float() * self.states.cur_scale
        scaled.register_hook(arrives)
        return scaled

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which no gradients are reduced; a later backward or step reduces them. Any stage."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Callable[[int], int] | Mapping[str, Callable[[int], int]]
    ) -> None:
        """Let a function of the step, counted from 1, decide the sequence length of a custom curriculum.

        Args:
            schedule_func_dict: the function, or a dictionary in which it is under ``seqlen``.

        Raises:
            ConfigError: the curriculum of the JSON is not custom, or the dictionary has other metrics.
        """
        functions = schedule_func_dict
        if isinstance(functions, Mapping):
            if [*functions] != ["seqlen"]:
                raise ConfigError(
                    f"`schedule_func_dict` must be for the metric seqlen alone, but is for {[*functions]}; "
                    "others choose samples, which the script does here"
                )
            functions = functions["seqlen"]
        if not isinstance(self.settings.seqlen, ScriptLengths):
            raise ConfigError(
                "`curriculum_learning.schedule_type` must be custom for a schedule of the script, but is "
                "not; set it in the JSON"
            )
        self.settings = replace(self.settings, seqlen=ScriptLengths(functions))

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Context whose backwards are reduced together, at its end, where each would be by itself."""
        before, self._together = self._together, True
        try:
            yield
        finally:
            self._together = before
        if self._backwards and self._sync and not before and self._should_reduce():
            self.states.parallel.reduce(0)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Start to reduce all gradients that no backward has reduced, as `step` would; every rank calls this.

        Args:
            bucket_size: without effect; buckets have the size of the configuration.
        """
        self._must_train("allreduce_gradients")
        if self._backwards:
            self.states.parallel.reduce(0)

    def random_ltd_initialize(self) -> None:
        """Give converted layers their turns; see `convert_to_random_ltd`.

        Raises:
            ConfigError: random-LTD is off, or the section does not fit the layers.
        """
        if self.random_ltd_scheduler is None:
            raise ConfigError("`data_efficiency.data_routing.random_ltd` must be enabled, but is not")
        initialize_layers(self.module, self.config, self.random_ltd_scheduler)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before an update."""
        if self._boundary is not None:
            return self._boundary
        if not self.managed_gradient_accumulation():
            return True
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide by hand, from now on, whether a micro-batch is the last before an update; None counts."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients so far; every rank calls this."""
        if self._shown is not None:
            self._shown.hide()
        self.states.zero_grad()

    @property
    def losses(self) -> Tensor | None:
        """The mean of this rank's losses since the last update; None if there were none."""
        return torch.stack(self._losses).mean() if self._losses else None

    def _should_reduce(self) -> bool:
        """Whether a backward is to be reduced: at a boundary; always if its sums have no room to be whole."""
        if self.settings.zero.stage >= 2:
            return True
        return bool(self.managed_gradient_accumulation()) and self.is_gradient_accumulation_boundary()

    def _begin(self, factor: float) -> None:
        parallel = self.states.parallel
        self.states.begin()
        self._reduces = self._sync and not self._together and self._should_reduce()
        parallel.factor = factor
        parallel.begin_backward(0, reduce=self._reduces and self.settings.zero.overlap_grad_reduce)

    def _begin_script(self) -> None:
        self._must_train("backward")
        if self.states.cur_scale != 1.0 and not self._scaled:
            raise MegazeroError(
                f"`loss.backward()` must be of a scaled loss where the scale is {self.states.cur_scale:g}, "
                "but it is not scaled; call `engine.scale(loss).backward()` or `engine.backward(loss)`"
            )
        self._begin(self.states.loss_factor / (self.states.cur_scale * self.gradient_accumulation_steps()))

    def _end(self) -> None:
        parallel = self.states.parallel
        parallel.end_backward()
        if self._reduces and not self.settings.zero.overlap_grad_reduce:
            parallel.reduce(0)
        if self._shown is not None:
            if self._reduces:
                parallel.settle()
            self._shown.show()
        self._backwards += 1
        self._scaled = False

    def _drop(self) -> None:
        """Forget the gradients so far, because a backward has failed."""
        self.states.parallel.interrupted()
        self.states.drop()
        self._backwards, self._losses, self._scaled = 0, [], False

    def _must_be_current(self, what: str) -> None:
        if self._script.gone:
            raise MegazeroError(
                f"`{what}` must be called on the engine that the model has now, but a later `initialize` or "
                "`destroy` has taken the model from this one; use the engine that the last `initialize` gave"
            )

    def _must_train(self, what: str) -> None:
        self._must_be_current(what)
        if self.states.idle:
            raise MegazeroError(
                f"`{what}` must be called on an engine with an optimizer, but `initialize` was given none; "
                'pass `optimizer` or add the section "optimizer" to the configuration'
            )


def _must_be_loss(loss: Any) -> None:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return
    shown = type(loss).__name__
    if isinstance(loss, Tensor):
        shown = f"of shape {tuple(loss.shape)}, {'with' if loss.requires_grad else 'without'} gradients"
    raise MegazeroError(
        f"`loss` must be a scalar tensor that requires gradients, but is {shown}; pass what the model's "
        "forward computed"
    )
