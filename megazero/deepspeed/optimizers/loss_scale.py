"""DeepSpeed's dynamic loss scale, and the members of its optimizers that concern it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from megazero.config.tree.precision import PrecisionConfig
from megazero.errors import ConfigError
from megazero.optim.loss_scaler import (
    LARGEST_SCALE,
    DynamicLossScaler,
    LossScaler,
    ScalerState,
    StaticLossScaler,
    build_loss_scaler,
)
from megazero.zero.optimizer import StepReport


@dataclass(frozen=True)
class DeepSpeedLossScaler(DynamicLossScaler):
    """Doubles the scale `window` + 1 good steps after the start or an overflow, then every `window` steps.

    An overflow halves the scale once `hysteresis` is used up; a doubling restores `hysteresis`.
    """

    consecutive: ClassVar[bool] = False

    def _after_overflow(self, state: ScalerState) -> ScalerState:
        if state.hysteresis_left > 1:
            return replace(state, growth_tracker=0, hysteresis_left=state.hysteresis_left - 1)
        return replace(super()._after_overflow(state), hysteresis_left=1)

    def _after_good_step(self, state: ScalerState) -> ScalerState:
        good_steps = state.growth_tracker  # since the start or the last overflow
        grows = good_steps > 0 and good_steps % self.window == 0
        return ScalerState(
            min(state.scale * self.growth, LARGEST_SCALE) if grows else state.scale,
            good_steps + 1,
            self.hysteresis if grows or self.consecutive else state.hysteresis_left,
        )


class ConsecutiveLossScaler(DeepSpeedLossScaler):
    """A `DeepSpeedLossScaler` that restores the hysteresis after every good step."""

    consecutive = True


def build_deepspeed_scaler(precision: PrecisionConfig, *, consecutive: bool) -> LossScaler:
    """Build the loss scaler of an engine.

    Args:
        precision: the type of the weights, and the settings of the scale.
        consecutive: `fp16.consecutive_hysteresis` of the JSON.
    """
    scaler = build_loss_scaler(precision)
    if not isinstance(scaler, DynamicLossScaler):
        return scaler
    kind = ConsecutiveLossScaler if consecutive else DeepSpeedLossScaler
    return kind(**vars(scaler))


class LossScaleView:
    """DeepSpeed's `optimizer.loss_scaler` and `optimizer.loss_scale_config`.

    Attributes:
        dynamic, dynamic_loss_scale: whether the scale is dynamic.
        use_grad_scaling: whether losses are scaled at all.
        scale_window: good steps until the scale grows; None if it is static.
        scale_factor: the factor by which it grows; None if it is static.
        min_scale, min_loss_scale: its minimum; None if it is static.
        cur_scale: the scale; a script may set it.
        cur_iter: the steps so far.
        last_overflow_iter: the last step that overflowed; -1 if none did.
        cur_hysteresis: the overflows that are tolerated before the scale is halved.

    Args:
        optimizer: the optimizer that has the scale.
    """

    def __init__(self, optimizer: ScaleAndRate):
        self._optimizer = optimizer
        scaler = optimizer.scaler
        self.dynamic = self.dynamic_loss_scale = scaler.searches
        self.use_grad_scaling = scaler.searches or optimizer.cur_scale != 1.0
        self.scale_window: int | None = getattr(scaler, "window", None)
        self.scale_factor: float | None = getattr(scaler, "growth", None)
        self.min_scale: float | None = getattr(scaler, "min_scale", None)
        self.min_loss_scale = self.min_scale

    @property
    def cur_scale(self) -> float:
        return self._optimizer.cur_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self._optimizer.cur_scale = scale

    loss_scale = cur_scale

    @property
    def cur_hysteresis(self) -> int:
        return self._optimizer.scaler_state.hysteresis_left

    @property
    def cur_iter(self) -> int:
        return self._optimizer.steps

    @property
    def last_overflow_iter(self) -> int:
        return max(-1, self.cur_iter - self._optimizer.scaler_state.growth_tracker - 1)


class ScaleAndRate:
    """The loss scale and the learning rates of a `DeepSpeedOptimizer`.

    Args:
        scaler: decides the loss scale.
        optimizer: has the parameter groups, which a script may replace.

    Attributes:
        scaler_state: the loss scale and its counters.
        report: the report of the last step; None before the first.
        steps: the steps so far, skipped ones included.
        overflows: the result of `check_overflow` since the last step; None without a call.
    """

    def __init__(self, scaler: LossScaler, optimizer: torch.optim.Optimizer):
        self.scaler, self.scaler_state = scaler, scaler.initial()
        self.optimizer = optimizer
        self.report: StepReport | None = None
        self.steps = 0
        self.overflows: bool | None = None

    @property
    def cur_scale(self) -> float:
        """The loss scale; a dynamic scale goes on from a value that is set."""
        return self.scaler_state.scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self.scaler_state = replace(self.scaler_state, scale=_positive(scale))

    loss_scale = cur_scale

    @property
    def loss_scaler(self) -> LossScaleView:
        """The loss scale as DeepSpeed's scaler object."""
        return LossScaleView(self)

    loss_scale_config = loss_scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.scaler.searches

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use this static loss scale from now on."""
        self.scaler = StaticLossScaler(_positive(loss_scale))
        self.scaler_state = self.scaler.initial()

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite on some rank.

        After `check_overflow`, whether a gradient of the step in progress is not finite.
        """
        if self.overflows is not None:
            return self.overflows
        return self.report is not None and not self.report.applied

    @property
    def _global_grad_norm(self) -> float:
        """The gradient norm of the last update, over all ranks and before clipping; 0 before the first."""
        return 0.0 if self.report is None else self.report.grad_norm

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])


def _positive(scale: float) -> float:
    number = float(scale.item() if isinstance(scale, torch.Tensor) else scale)
    if not 0 < number <= LARGEST_SCALE:
        raise ConfigError(f"`loss_scale` must be positive and finite, but is {number}; choose another")
    return number
