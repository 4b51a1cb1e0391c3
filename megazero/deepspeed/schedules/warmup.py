"""DeepSpeed's learning rate schedules over warmups, and its range test; `one_cycle.py` has OneCycle.

The values are DeepSpeed's at every step, including edge cases. As there, the value set at construction holds
for the first update, and the first `step` sets the rate of count 0: if warmup starts from zero, the first
two updates change nothing.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from megazero.errors import ConfigError

PerGroup = float | Sequence[float]
"""One value for all parameter groups, or a list with one for each."""


class ScheduleError(ConfigError, ValueError):
    """A schedule is given what it does not take; a ValueError too, which scripts for DeepSpeed catch."""


class RateSchedule(ABC):
    """Moves the `lr` of an optimizer's parameter groups from step to step.

    Attributes:
        optimizer: the optimizer whose groups it moves.
        last_batch_iteration: the count of the last `step`; -1 before the first.

    Args:
        optimizer: a torch optimizer, or a wrapper with one as its `optimizer`.
        last_batch_iteration: the count to go on from; with -1 the groups get their first rates at once.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1):
        self.optimizer = torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] | None = None

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The rate of each group at `last_batch_iteration`."""

    def get_last_lr(self) -> list[Any]:
        """The rates that were set last.

        Raises:
            AssertionError: none has been set yet.
        """
        if self._last_lr is None:
            raise AssertionError("need to call step() first: no learning rate has been set yet")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next count, or to the given one."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedule."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. The next `step` sets the rates; until then they are part of the optimizer's."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _begin(self, rates: Sequence[float]) -> None:
        """Set the first rates, unless the schedule goes on from a count."""
        if self.last_batch_iteration == -1:
            self._set(rates)

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _each(self, value: PerGroup, name: str) -> list[float]:
        """The value for each group."""
        count = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * count  # type: ignore[list-item]
        if len(value) != count:
            raise ScheduleError(
                f"`{name}` must be a number or a list with one for each of {count} parameter groups, but has "
                f"{len(value)}"
            )
        return list(value)


class WarmupSchedule(RateSchedule):
    """A schedule that begins with a warmup.

    Attributes:
        warmup: its first steps.
    """

    warmup: Warmup

    @property
    def warmup_num_steps(self) -> int:
        """The length of the warmup in steps."""
        return self.warmup.steps

    @property
    def warmup_type(self) -> str:
        """``log`` or ``linear``."""
        return self.warmup.kind


class WarmupLR(WarmupSchedule):
    """From the lowest to the highest rate along a logarithm or a line, then constant.

    Args:
        optimizer: see `RateSchedule`.
        warmup_min_lr: the rate at the start; one, or one for each group.
        warmup_max_lr: the rate after the warmup; by default each group's own.
        warmup_num_steps: the length of the warmup in steps, at least 2.
        warmup_type: ``log`` or ``linear``; anything else is ``log``, with a warning.
        last_batch_iteration: see `RateSchedule`.

    Raises:
        ScheduleError: `warmup_num_steps` is no positive integer, or a list has the wrong length.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        self.warmup = Warmup(warmup_num_steps, warmup_type)
        own = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = self._each(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._each(own if warmup_max_lr is None else warmup_max_lr, "warmup_max_lr")
        self.delta_lrs = [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        self._begin(self.get_lr())

    def get_lr(self) -> list[float]:
        share = 0.0 if self.last_batch_iteration < 0 else self._share()
        return [low + delta * share for low, delta in zip(self.min_lrs, self.delta_lrs, strict=True)]

    def _share(self) -> float:
        progress = self.warmup.progress(self.last_batch_iteration)
        return 1.0 if progress is None else progress


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, then along a line to the lowest rate.

    Args:
        optimizer, warmup_min_lr, warmup_num_steps, warmup_type, last_batch_iteration: see `WarmupLR`.
        total_num_steps: the step at which the lowest rate is reached.
        warmup_max_lr: the rate after the warmup; by default 0.001, whatever the groups' own are.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )
        self.warmup.warn_if_longer(total_num_steps)

    def _share(self) -> float:
        progress = self.warmup.progress(self.last_batch_iteration)
        if progress is not None:
            return progress
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup.steps))


class WarmupCosineLR(WarmupSchedule):
    """From a share of each group's rate up to it, then along a cosine down to another share.

    Args:
        optimizer: see `RateSchedule`.
        total_num_steps: the step at which the lowest rate is reached.
        warmup_min_ratio: the share at the start of the warmup.
        warmup_num_steps, warmup_type: see `WarmupLR`.
        cos_min_ratio: the share at the end.
        last_batch_iteration: see `RateSchedule`.

    Raises:
        ScheduleError: `warmup_num_steps` is no positive integer.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        self.warmup = Warmup(warmup_num_steps, warmup_type)
        self.warmup.warn_if_longer(total_num_steps)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._begin(self.get_lr())

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """The share of each group's rate; 0 before the first step."""
        count = self.last_batch_iteration
        if count < 0:
            return 0.0
        progress = self.warmup.progress(count)
        if progress is not None:
            return self.warmup_min_ratio + progress * (1.0 - self.warmup_min_ratio)
        steps = self.warmup.steps
        done = min(1.0, (count - steps + 1) / max(1, self.total_num_steps - steps))
        height = (1 + math.cos(math.pi * done)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)


class LRRangeTest(RateSchedule):
    """A rate that only grows, to find the one at which training diverges (Smith 2018).

    Args:
        optimizer: see `RateSchedule`.
        lr_range_test_min_lr: the first rate; one, or one for each group.
        lr_range_test_step_size: the number of steps in which the rate grows by `lr_range_test_step_rate`
            times the first one.
        lr_range_test_step_rate: see there.
        lr_range_test_staircase: grow at the end of each such number of steps, not all along.
        last_batch_iteration: see `RateSchedule`.

    Raises:
        ScheduleError: the step size is no positive integer, or a list has the wrong length.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._each(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = positive(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        self._begin(self.min_lr)

    def get_lr(self) -> list[float]:
        done = (self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(done) if self.staircase else done)
        return [rate * growth for rate in self.min_lr]


class Warmup:
    """The first steps of a schedule.

    Args:
        steps: how many; one counts as two.
        kind: ``log`` or ``linear``.
    """

    def __init__(self, steps: int, kind: str):
        self.steps = max(2, positive(steps, "warmup_num_steps"))
        self.kind = kind if kind in ("log", "linear") else "log"
        if kind != self.kind:
            warnings.warn(f"`warmup_type` must be log or linear, but is {kind}: log is taken", stacklevel=3)

    def progress(self, count: int) -> float | None:
        """How far it is after so many steps, from 0 to 1; None when it is over."""
        if count >= self.steps:
            return None
        return count / self.steps if self.kind == "linear" else math.log(count + 1) / math.log(self.steps)

    def warn_if_longer(self, total: int) -> None:
        """Warn if it is longer than the whole schedule."""
        if total < self.steps:
            warnings.warn(
                f"`total_num_steps` {total} is less than `warmup_num_steps` {self.steps}", stacklevel=3
            )


def positive(value: Any, name: str) -> int:
    """The value, if it is a positive integer.

    Raises:
        ScheduleError: it is not.
    """
    if not isinstance(value, int) or value <= 0:
        raise ScheduleError(f"`{name}` must be a positive integer, but is {value!r}")
    return value


def torch_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer that this is, or that it wraps.

    Raises:
        TypeError: there is none.
    """
    inner = optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is no torch.optim.Optimizer and wraps none")
    return inner
