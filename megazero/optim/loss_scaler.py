"""Loss scales: factors of the loss by which fp16 gradients neither vanish nor overflow.

The method is that of Micikevicius et al. 2018 (arXiv:1710.03740) with Megatron's hysteresis. A scaler holds
no state: `update` maps the state before a step to the state after it, so the state can be saved, compared
and resumed like any plain value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from megazero.config.tree.precision import PrecisionConfig
from megazero.errors import ConfigError, NumericsError

# The largest power of two that fp32 holds: doubling it would give inf, and halving inf gives inf again.
LARGEST_SCALE = 2.0**127


@dataclass(frozen=True)
class ScalerState:
    """The state that a loss scaler carries from step to step.

    Attributes:
        scale: the factor of the loss; gradients are divided by it before clipping.
        growth_tracker: good steps in a row since the scale last changed or a step overflowed.
        hysteresis_left: overflows that are still tolerated before the scale halves.
        overflows_at_floor: overflows in a row while the scale could not fall any further.
    """

    scale: float
    growth_tracker: int = 0
    hysteresis_left: int = 0
    overflows_at_floor: int = 0


class LossScaler(Protocol):
    """Decides the loss scale of the next step from what happened in this one.

    Attributes:
        searches: whether it finds the scale by skipping the updates of steps that overflow.
    """

    searches: ClassVar[bool]

    def initial(self) -> ScalerState:
        """The state before the first step."""

    def update(self, state: ScalerState, found_nonfinite: bool) -> ScalerState:
        """The state after a step; `found_nonfinite` says whether any gradient on any rank was inf or NaN."""


@dataclass(frozen=True)
class StaticLossScaler(LossScaler):
    """Uses the same scale at every step; steps with non-finite gradients are still skipped."""

    searches: ClassVar[bool] = False

    scale: float

    def initial(self) -> ScalerState:
        return ScalerState(self.scale)

    def update(self, state: ScalerState, found_nonfinite: bool) -> ScalerState:
        return state


@dataclass(frozen=True)
class DynamicLossScaler(LossScaler):
    """Halves the scale after `hysteresis` overflows and doubles it after `window` good steps in a row.

    As in Megatron, a good step does not restore the tolerated overflows, but a doubling does; once they are
    used up, every further overflow halves the scale. `floor_patience` overflows in a row at the floor end
    the training, because no scale would help.

    Raises:
        ConfigError: the initial scale is below the floor.
    """

    searches: ClassVar[bool] = True

    initial_scale: float
    min_scale: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    backoff: float = 0.5
    growth: float = 2.0
    floor_patience: int = 50

    def __post_init__(self) -> None:
        if self.initial_scale < self.min_scale:
            raise ConfigError(
                f"`initial_loss_scale` must be at least `min_loss_scale` ({self.min_scale}), but is "
                f"{self.initial_scale}; raise it."
            )

    def initial(self) -> ScalerState:
        return ScalerState(self.initial_scale, 0, self.hysteresis)

    def update(self, state: ScalerState, found_nonfinite: bool) -> ScalerState:
        """The state after a step.

        Raises:
            NumericsError: after `floor_patience` overflows in a row at the floor.
        """
        return self._after_overflow(state) if found_nonfinite else self._after_good_step(state)

    def _after_overflow(self, state: ScalerState) -> ScalerState:
        left = max(state.hysteresis_left - 1, 0)
        if left > 0:
            return replace(state, growth_tracker=0, hysteresis_left=left)
        stuck = state.overflows_at_floor + 1 if state.scale <= self.min_scale else 0
        if stuck >= self.floor_patience:
            raise NumericsError(
                f"The gradients must be finite at the smallest loss scale ({self.min_scale}), but were not "
                f"for {stuck} steps in a row; lower the learning rate, train in bf16, or look for bad "
                f"values in the data or the checkpoint."
            )
        return ScalerState(max(state.scale * self.backoff, self.min_scale), 0, 0, stuck)

    def _after_good_step(self, state: ScalerState) -> ScalerState:
        good = state.growth_tracker + 1
        if good < self.window:
            return replace(state, growth_tracker=good, overflows_at_floor=0)
        return ScalerState(min(state.scale * self.growth, LARGEST_SCALE), 0, self.hysteresis)


def build_loss_scaler(precision: PrecisionConfig) -> LossScaler:
    """A static scaler if a loss scale is set; otherwise a dynamic one for fp16, and scale 1 for fp32 and
    bf16, whose exponents need no help.
    """
    if precision.loss_scale is not None:
        return StaticLossScaler(precision.loss_scale)
    if precision.dtype != "fp16":
        return StaticLossScaler(1.0)
    return DynamicLossScaler(
        initial_scale=precision.initial_loss_scale,
        min_scale=precision.min_loss_scale,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
    )
