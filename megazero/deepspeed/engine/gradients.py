"""An engine's forward and backward, and the accumulation and reduction of gradients."""

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
    """The gradients of a step: their mean over micro-batches and data-parallel ranks.

    Each backward adds to them, whether the engine runs it or the script does with ``loss.backward()``.

    Args:
        is_last: whether the current micro-batch is the last one before an update; a script may override it.

    Attributes:
        script: detects the script's own backwards.
        shown: the gradients that the script sees; None if it sees none.
        sync: whether gradients are reduced; False within `no_sync`.
        scaled: whether the script's next backward is of a loss that `scale` returned.
    """

    def __init__(self, state: EngineState, is_last: Callable[[], bool | None]):
        self.state, self.states, self.parallel = state, state.states, state.states.parallel
        self.is_last = is_last
        self.sync, self.scaled = True, False
        self._boundary: bool | None = None
        self._coalesces = self._reduces = False
        shows = self.states.shows_gradients
        self.shown = ShownGradients(self.parallel, self.states.sum_to_mean) if shows else None
        self.script = ScriptBackward(self.parallel, self._begin_script, self.end, self.shown)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context without reductions of gradients, at any stage; a later backward or step reduces them."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Context whose backwards share one reduction, at its end."""
        before, self._coalesces = self._coalesces, True
        try:
            yield
        finally:
            self._coalesces = before
        if self.state.backwards and self.sync and not before and self._should_reduce():
            self.parallel.reduce(0)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Start the reduction that `step` would start; every rank calls this.

        Args:
            bucket_size: has no effect; the configuration sets the size of buckets.
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
        """Override `is_gradient_accumulation_boundary` from now on; None restores it."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step in progress; every rank calls this."""
        if self.shown is not None:
            self.shown.hide()
        self.states.zero_grad()

    def begin(self, factor: float) -> None:
        """Begin a backward whose gradients are multiplied by `factor`."""
        self.states.begin()
        self._reduces = self.sync and not self._coalesces and self._should_reduce()
        self.parallel.factor = factor
        self.parallel.begin_backward(0, reduce=self._reduces and self.state.settings.zero.overlap_grad_reduce)

    def end(self) -> None:
        """End a backward: start its reduction if it is due, and show gradients to the script."""
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
        """Forget the gradients of the step in progress, because a backward has failed."""
        self.parallel.interrupted()
        self.states.drop()
        self.state.forget()
        self.scaled = False

    def must_train(self, what: str) -> None:
        """Raise MegazeroError if the engine has no optimizer, or a later engine has taken its module."""
        self.must_be_current(what)
        if self.states.idle:
            raise MegazeroError(
                f"`{what}` must be called on an engine with an optimizer, but `initialize` was given none; "
                'pass `optimizer` or add the section "optimizer" to the configuration'
            )

    def must_be_current(self, what: str) -> None:
        """Raise MegazeroError if a later engine has taken the module."""
        if self.script.gone:
            raise MegazeroError(
                f"`{what}` must be called on the engine that the model has now, but a later `initialize` or "
                "`destroy` has taken the model from this one; use the engine that the last `initialize` gave"
            )

    def _should_reduce(self) -> bool:
        """Whether this backward reduces: at a boundary, and always at stages that keep no whole gradients."""
        settings = self.state.settings
        managed = settings.extras.managed_gradient_accumulation
        return settings.zero.stage >= 2 or (managed and bool(self.is_last()))

    def _begin_script(self) -> None:
        self.must_train("backward")
        if self.states.cur_scale != 1.0 and not self.scaled:
            raise MegazeroError(
                f"`loss.backward()` must be of a scaled loss where the scale is {self.states.cur_scale:g}, "
                "but it is not scaled; call `engine.scale(loss).backward()` or `engine.backward(loss)`"
            )
        self.begin(self.states.loss_factor / (self.states.cur_scale * self.state.settings.batch.accumulation))


class ForwardBackward:
    """An engine's forward and backward.

    Args:
        accumulation: the gradients of the step.
    """

    def __init__(self, state: EngineState, accumulation: Accumulation):
        self.state, self.states, self._accumulation = state, state.states, accumulation
        self._autocast = Autocast.of(state.settings)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the module's forward; with `fp16.auto_cast`, inputs are cast to fp16.

        In training, the module gets a curriculum's sequence length as ``curriculum_seqlen``, for the step in
        progress (counted from 1), and progressive layer dropping's share of layers to keep as ``pld_theta``.
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
        """Compute the gradients of a loss and add them to the step's; every rank calls this.

        Args:
            loss: the mean loss of this rank's micro-batch, a scalar.
            retain_graph: as in torch.
            scale_wrt_gas: divide the loss by the accumulation steps.

        Returns:
            The loss, divided by the accumulation steps if `scale_wrt_gas` is set.

        Raises:
            MegazeroError: `loss` is not a scalar that requires gradients, or the engine cannot train.
        """
        state, accumulation = self.state, self._accumulation
        accumulation.must_train("backward")
        _must_be_loss(loss)
        if accumulation.script.recover():
            accumulation.drop()
        divided = loss / state.settings.batch.accumulation if scale_wrt_gas else loss
        scale, factor = self.states.loss_factor, 1.0
        # In fp16 the rest of the factor is applied later: the range of backward must not depend on the ranks.
        if state.settings.precision.dtype == "fp16":
            scale, factor = self.states.cur_scale, self.states.loss_factor / self.states.cur_scale
        with state.reporter.phase("backward"), state.reporter.counting():
            if accumulation.shown is not None:
                accumulation.shown.hide()
            accumulation.begin(factor)
            try:
                (divided.float() * scale).backward(retain_graph=retain_graph)
            except BaseException:
                accumulation.drop()
                raise
            accumulation.end()
        state.losses.append(loss.detach().float().reshape(()))
        return divided

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the loss scale, for a script that runs ``engine.scale(loss).backward()``.

        Raises:
            MegazeroError: `loss` is not a scalar that requires gradients, or the engine cannot train.
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
        """Set the function of the step (from 1) that gives the sequence length of a custom curriculum.

        Args:
            schedule_func_dict: the function, or a dictionary with it under ``seqlen``.

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
        """Initialize random-LTD in the layers that `convert_to_random_ltd` has converted.

        Raises:
            ConfigError: random-LTD is off, or its section does not fit the layers.
        """
        state = self.state
        if state.random_ltd_scheduler is None:
            raise ConfigError("`data_efficiency.data_routing.random_ltd` must be enabled, but is not")
        initialize_layers(state.module, state.arguments.config, state.random_ltd_scheduler)


def _must_be_loss(loss: object) -> None:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return
    shown = type(loss).__name__
    if isinstance(loss, Tensor):
        shown = f"of shape {tuple(loss.shape)}, {'with' if loss.requires_grad else 'without'} gradients"
    raise MegazeroError(
        f"`loss` must be a scalar tensor that requires gradients, but is {shown}; pass what the model's "
        "forward computed"
    )
