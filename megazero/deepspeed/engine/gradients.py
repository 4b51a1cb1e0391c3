"""An engine's forwards and backwards: scaled, divided by the accumulation, reduced when they should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megazero.deepspeed.engine.autocast import Autocast
from megazero.deepspeed.engine.data import to_half
from megazero.deepspeed.engine.script_backward import ScriptBackward, ShownGradients
from megazero.deepspeed.engine.state import EngineState
from megazero.deepspeed.models.random_ltd import initialize_layers
from megazero.deepspeed.schedules.curriculum import ScriptLengths
from megazero.errors import ConfigError, MegazeroError


class Accumulation:
    """The gradients of a step, which backwards add up: the mean over micro-batches and data-parallel ranks.

    Each backward adds to them, whether the engine runs it or the script does with ``loss.backward()``.

    Args:
        engine: says whether a micro-batch is the last, which a script may override.

    Attributes:
        script: notices the script's own backwards.
        shown: the gradients that the script sees; None if it sees none.
        sync: whether gradients are reduced now; not within `no_sync`.
        scaled: whether the next backward of the script is of a loss that `scale` gave.
    """

    def __init__(self, state: EngineState, engine: Any):
        self.state, self.states, self.parallel = state, state.states, state.states.parallel
        self._engine = engine
        self.sync, self.scaled = True, False
        self._boundary: bool | None = None
        self._together = self._reduces = False
        shows = self.states.shows_gradients
        self.shown = ShownGradients(self.parallel, self.states.share) if shows else None
        self.script = ScriptBackward(self.parallel, self._begin_script, self.end, self.shown)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which no gradients are reduced; a later backward or step reduces them. Any stage."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Context whose backwards are reduced together, at its end, where each would be by itself."""
        before, self._together = self._together, True
        try:
            yield
        finally:
            self._together = before
        if self.state.backwards and self.sync and not before and self._should_reduce():
            self.parallel.reduce(0)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Start to reduce all gradients that no backward has reduced, as `step` would; every rank calls this.

        Args:
            bucket_size: without effect; buckets have the size of the configuration.
        """
        self.must_train("allreduce_gradients")
        if self.state.backwards:
            self.parallel.reduce(0)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before an update."""
        if self._boundary is not None:
            return self._boundary
        if not self.state.settings.extras.managed_gradient_accumulation:
            return True
        return (self.state.micro_steps + 1) % self.state.settings.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide by hand, from now on, whether a micro-batch is the last before an update; None counts."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients so far; every rank calls this."""
        if self.shown is not None:
            self.shown.hide()
        self.states.zero_grad()

    def begin(self, factor: float) -> None:
        """Begin a backward whose gradients count times `factor`."""
        self.states.begin()
        self._reduces = self.sync and not self._together and self._should_reduce()
        self.parallel.factor = factor
        self.parallel.begin_backward(0, reduce=self._reduces and self.state.settings.zero.overlap_grad_reduce)

    def end(self) -> None:
        """End a backward: reduce what it should, and show what the script may see."""
        self.parallel.end_backward()
        if self._reduces and not self.state.settings.zero.overlap_grad_reduce:
            self.parallel.reduce(0)
        if self.shown is not None:
            if self._reduces:
                self.parallel.settle()
            self.shown.show()
        self.state.backwards += 1
        self.scaled = False

    def drop(self) -> None:
        """Forget the gradients so far, because a backward has failed."""
        self.parallel.interrupted()
        self.states.drop()
        self.state.forget()
        self.scaled = False

    def is_last(self) -> bool:
        """Whether the engine says that the current micro-batch is the last one before an update."""
        return bool(self._engine.is_gradient_accumulation_boundary())

    def must_train(self, what: str) -> None:
        """Raise MegazeroError if the engine has no optimizer, or no module any more."""
        self.must_be_current(what)
        if self.states.idle:
            raise MegazeroError(
                f"`{what}` must be called on an engine with an optimizer, but `initialize` was given none; "
                'pass `optimizer` or add the section "optimizer" to the configuration'
            )

    def must_be_current(self, what: str) -> None:
        """Raise MegazeroError if another engine has the module now."""
        if self.script.gone:
            raise MegazeroError(
                f"`{what}` must be called on the engine that the model has now, but a later `initialize` or "
                "`destroy` has taken the model from this one; use the engine that the last `initialize` gave"
            )

    def _should_reduce(self) -> bool:
        """Whether a backward is to be reduced: at a boundary; always if its sums have no room to be whole."""
        settings = self.state.settings
        return settings.zero.stage >= 2 or (settings.extras.managed_gradient_accumulation and self.is_last())

    def _begin_script(self) -> None:
        self.must_train("backward")
        if self.states.cur_scale != 1.0 and not self.scaled:
            raise MegazeroError(
                f"`loss.backward()` must be of a scaled loss where the scale is {self.states.cur_scale:g}, "
                "but it is not scaled; call `engine.scale(loss).backward()` or `engine.backward(loss)`"
            )
        self.begin(self.states.loss_factor / (self.states.cur_scale * self.state.settings.batch.accumulation))


class Passes:
    """An engine's forward and backward.

    Args:
        accumulation: adds gradients up.
    """

    def __init__(self, state: EngineState, accumulation: Accumulation):
        self.state, self.states, self._accumulation = state, state.states, accumulation
        self._autocast = Autocast.of(state.settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; with `fp16.auto_cast`, inputs are cast to fp16.

        With a curriculum, the module is told in training how many tokens of its batch to use, as
        ``curriculum_seqlen``; the number is that of the step in progress, counted from 1. With progressive
        layer dropping, it is told the share of layers to keep, as ``pld_theta``.
        """
        state, accumulation = self.state, self._accumulation
        accumulation.must_be_current("forward")
        if accumulation.script.recover():
            accumulation.drop()
        if state.settings.seqlen is not None and state.module.training:
            kwargs = {**kwargs, "curriculum_seqlen": state.settings.seqlen.at(state.global_steps + 1)}
        if state.settings.layer_drop is not None and state.module.training:
            kwargs = {**kwargs, **state.settings.layer_drop.arguments(state.global_steps)}
        if state.random_ltd_scheduler is not None and state.module.training:
            state.random_ltd_scheduler.update_seq(state.global_steps)
        if state.settings.extras.auto_cast:
            args, kwargs = to_half(args), to_half(kwargs)
        explaining, cast = self.states.parallel.order.explaining, self._autocast.around(state.context.device)
        reporter, step = state.reporter, state.global_steps + 1
        profiling = reporter.profiling(state.module, step) if state.module.training else nullcontext()
        with reporter.phase("forward"), reporter.counting(), profiling, explaining(), cast:
            output = state.module(*args, **kwargs)
        if torch.is_grad_enabled():
            accumulation.script.watch(output)
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
        state, accumulation = self.state, self._accumulation
        accumulation.must_train("backward")
        _must_be_loss(loss)
        if accumulation.script.recover():
            accumulation.drop()
        counted = loss / state.settings.batch.accumulation if scale_wrt_gas else loss
        scale, arriving = self.states.loss_factor, 1.0
        if state.settings.precision.dtype == "fp16":  # a gradient's range is the same on any number of ranks
            scale, arriving = self.states.cur_scale, self.states.loss_factor / self.states.cur_scale
        with state.reporter.phase("backward"), state.reporter.counting():
            if accumulation.shown is not None:
                accumulation.shown.hide()
            accumulation.begin(arriving)
            try:
                (counted.float() * scale).backward(retain_graph=retain_graph)
            except BaseException:
                accumulation.drop()
                raise
            accumulation.end()
        state.losses.append(loss.detach().float().reshape(()))
        return counted

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a script that runs ``engine.scale(loss).backward()``.

        Raises:
            MegazeroError: `loss` is not a scalar that gradients can be taken of, or the engine cannot train.
        """
        state, accumulation = self.state, self._accumulation
        accumulation.must_train("scale")
        _must_be_loss(loss)
        value = loss.detach().float().reshape(())

        def arrives(grad: Tensor) -> None:
            accumulation.scaled = True
            state.losses.append(value)

        scaled = loss.float() * self.states.cur_scale
        scaled.register_hook(arrives)
        return scaled

    @property
    def losses(self) -> Tensor | None:
        """The mean of this rank's losses since the last update; None if there were none."""
        return torch.stack(losses).mean() if (losses := self.state.losses) else None

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Callable[[int], int] | Mapping[str, Callable[[int], int]]
    ) -> None:
        """Let a function of the step, counted from 1, decide the sequence length of a custom curriculum.

        Args:
            schedule_func_dict: the function, or a dictionary in which it is under ``seqlen``.

        Raises:
            ConfigError: the curriculum of the JSON is not custom, or the dictionary has other metrics.
        """
        functions, state = schedule_func_dict, self.state
        if isinstance(functions, Mapping):
            if [*functions] != ["seqlen"]:
                raise ConfigError(
                    f"`schedule_func_dict` must be for the metric seqlen alone, but is for {[*functions]}; "
                    "others choose samples, which the script does here"
                )
            functions = functions["seqlen"]
        if not isinstance(state.settings.seqlen, ScriptLengths):
            raise ConfigError(
                "`curriculum_learning.schedule_type` must be custom for a schedule of the script, but is "
                "not; set it in the JSON"
            )
        state.settings = replace(state.settings, seqlen=ScriptLengths(functions))

    def random_ltd_initialize(self) -> None:
        """Give converted layers their turns; see `convert_to_random_ltd`.

        Raises:
            ConfigError: random-LTD is off, or the section does not fit the layers.
        """
        state = self.state
        if state.random_ltd_scheduler is None:
            raise ConfigError("`data_efficiency.data_routing.random_ltd` must be enabled, but is not")
        initialize_layers(state.module, state.given.config, state.random_ltd_scheduler)


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
