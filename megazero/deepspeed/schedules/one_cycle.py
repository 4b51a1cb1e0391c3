"""DeepSpeed's OneCycle and LRRangeTest, the schedules of Smith 2018."""

from __future__ import annotations

import math
import warnings

from megazero.deepspeed.schedules.warmup import PerGroup, RateSchedule, RateScheduleError, positive

HIGHEST_MOMENTUM = 0.9999
"""The limit of a growing momentum: at 1, an average would ignore new gradients."""


class OneCycle(RateSchedule):
    """Raises the rate to `cycle_max_lr` and lowers it again, and the momentum inversely; then both decay.

    The momentum is the first of an optimizer's `betas`. An optimizer without `betas` keeps its momentum, with
    a warning.

    Args:
        optimizer, last_batch_iteration: see `RateSchedule`.
        cycle_min_lr, cycle_max_lr: the bounds of the rate; one value, or one for each group.
        decay_lr_rate: after the cycle, the rate is divided by 1 + this for each `decay_step_size` steps.
        cycle_first_step_size: the number of steps in which the rate rises.
        cycle_second_step_size: the number of steps in which it falls; by default the same.
        cycle_first_stair_count, cycle_second_stair_count: the number of stairs in each half; 0 for a line.
        decay_step_size: the number of steps of a decay interval; 0 turns decay off.
        cycle_momentum: whether the momentum changes.
        cycle_min_mom, cycle_max_mom: the bounds of the momentum; one value, or one for each group.
        decay_mom_rate: after the cycle, the momentum is multiplied by 1 + this for each `decay_step_size`
            steps, up to `HIGHEST_MOMENTUM`.

    Raises:
        RateScheduleError: a size is out of range, or a list has the wrong length.
    """

    def __init__(
        self,
        optimizer: object,
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
            raise RateScheduleError(
                "`cycle_first_step_size` must be positive and `cycle_second_step_size` at least 0, but they "
                f"are {cycle_first_step_size} and {second}"
            )
        self.first_step_size, self.second_step_size = float(cycle_first_step_size), float(second)
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.first_stair_count, self.second_stair_count = cycle_first_stair_count, stairs
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
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
        """The number of steps in the cycle."""
        return self.first_step_size + self.second_step_size

    @property
    def step_ratio(self) -> float:
        """The share of the cycle in which the rate rises."""
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
        """Return the betas of each group at `last_batch_iteration`; None if the momentum does not cycle."""
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
        """Return the position between minimum and maximum at the present count, from 0 to 1."""
        step = (self.last_batch_iteration + 1) % self.total_size
        rising = step <= self.first_step_size
        stairs = self.first_stair_count if rising else self.second_stair_count
        size = self.first_step_size if rising else self.second_step_size
        done = step if rising else self.total_size - step
        return math.floor(done * stairs / size) / stairs if stairs > 0 else done / size

    def _decay(self, rate: float) -> float:
        """Return the factor of the decay at the present count, after the cycle."""
        if math.isclose(self.decay_step_size, 0):
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size


class LRRangeTest(RateSchedule):
    """Grows the rate steadily, to find the one at which training diverges.

    Args:
        optimizer: see `RateSchedule`.
        lr_range_test_min_lr: the first rate; one value, or one for each group.
        lr_range_test_step_size: the number of steps in an interval.
        lr_range_test_step_rate: the growth in an interval, as a multiple of the first rate.
        lr_range_test_staircase: whether the rate grows only at the end of an interval.
        last_batch_iteration: see `RateSchedule`.

    Raises:
        RateScheduleError: the step size is no positive integer, or a list has the wrong length.
    """

    def __init__(
        self,
        optimizer: object,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = positive(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        self._begin(self.min_lr)

    def get_lr(self) -> list[float]:
        done = (self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(done) if self.staircase else done)
        return [rate * growth for rate in self.min_lr]
