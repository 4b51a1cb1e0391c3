"""DeepSpeed's OneCycle: learning rate and momentum over one cycle, then decay (Smith 2018)."""

from __future__ import annotations

import math
import warnings
from typing import Any

from megazero.deepspeed.schedules.warmup import PerGroup, RateSchedule, ScheduleError

HIGHEST_MOMENTUM = 0.9999
"""What a growing momentum stops at: at 1, an average never learns of a new gradient."""


class OneCycle(RateSchedule):
    """The rate goes up to `cycle_max_lr` and back while the momentum goes down and back; then both decay.

    The momentum is the first of an optimizer's `betas`; the second is left as it is. An optimizer without
    `betas` keeps its momentum, with a warning.

    Args:
        optimizer, last_batch_iteration: see `RateSchedule`.
        cycle_min_lr, cycle_max_lr: the bounds of the rate; one, or one for each group.
        decay_lr_rate: in `decay_step_size` steps after the cycle, 1 / rate grows by this share of its value.
        cycle_first_step_size: steps of the way up.
        cycle_second_step_size: steps of the way down; by default the same.
        cycle_first_stair_count, cycle_second_stair_count: stairs on each way; 0 for a line.
        decay_step_size: see `decay_lr_rate`; 0 turns decay off.
        cycle_momentum: whether the momentum moves.
        cycle_min_mom, cycle_max_mom: the bounds of the momentum; one, or one for each group.
        decay_mom_rate: in `decay_step_size` steps after the cycle, the momentum grows by this share of its
            value, to `HIGHEST_MOMENTUM` at most.

    Raises:
        ScheduleError: a size is out of range, or a list has the wrong length.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            raise ScheduleError(
                "`cycle_first_step_size` must be positive and `cycle_second_step_size` at least 0, but they "
                f"are {cycle_first_step_size} and {second}"
            )
        self.first_step_size, self.second_step_size = float(cycle_first_step_size), float(second)
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.first_stair_count, self.second_stair_count = cycle_first_stair_count, stairs
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = self._each(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._each(cycle_max_lr, "cycle_max_lr")
        self.min_moms = self._each(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._each(cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            warnings.warn(
                f"the momentum does not cycle: {type(self.optimizer).__name__} has no `betas`", stacklevel=2
            )
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            self._last_lr = None  # as in DeepSpeed, whose callers ask for it before the first step
            self._set_momenta(self.min_moms)

    @property
    def total_size(self) -> float:
        """The steps of the whole cycle."""
        return self.first_step_size + self.second_step_size

    @property
    def step_ratio(self) -> float:
        """The share of the way up in the cycle."""
        return self.first_step_size / self.total_size

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)
        if self.cycle_momentum:
            self._set_momenta(self._momenta())

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / self._decay(self.decay_lr_rate) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """The betas of each group at `last_batch_iteration`; None where the momentum does not cycle."""
        return [*map(tuple, self._betas(self._momenta()))] if self.cycle_momentum else None

    def _momenta(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            scale, pairs = self._scale(), zip(self.min_moms, self.max_moms, strict=True)
            return [high - (high - low) * scale for low, high in pairs]
        growth = self._decay(self.decay_mom_rate)
        return [min(high * growth, max(high, HIGHEST_MOMENTUM)) for high in self.max_moms]

    def _betas(self, momenta: list[float]) -> list[tuple[float, ...]]:
        groups = self.optimizer.param_groups
        return [(m, *group["betas"][1:]) for m, group in zip(momenta, groups, strict=True)]

    def _set_momenta(self, momenta: list[float]) -> None:
        if self.cycle_momentum:
            for group, betas in zip(self.optimizer.param_groups, self._betas(momenta), strict=True):
                group["betas"] = betas

    def _scale(self) -> float:
        """How high the cycle is at the present count, from 0 to 1."""
        at = (self.last_batch_iteration + 1) % self.total_size
        rising = at <= self.first_step_size
        stairs = self.first_stair_count if rising else self.second_stair_count
        of, size = (at, self.first_step_size) if rising else (self.total_size - at, self.second_step_size)
        return math.floor(of * stairs / size) / stairs if stairs > 0 else of / size

    def _decay(self, rate: float) -> float:
        """The factor by which a value is multiplied or divided by at the present count, after the cycle."""
        if math.isclose(self.decay_step_size, 0):
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size
