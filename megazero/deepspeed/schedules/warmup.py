"""DeepSpeed's learning rate schedules with a warmup, and the base of all its schedules.

The values equal DeepSpeed's at every step. As there, the first update uses the rate that construction sets,
and the first `step` sets the rate of count 0: if warmup starts from zero, the first two updates change
nothing.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from megazero.errors import ConfigError

PerGroup = float | Sequence[float]
"""One value for all parameter groups, or a list with one for each group."""


class RateScheduleError(ConfigError, ValueError):
    """An argument of a schedule is wrong; a ValueError too, because scripts for DeepSpeed catch that."""


class RateSchedule(ABC):
    """Sets the `lr` of an optimizer's parameter groups at each step.

    Attributes:
        optimizer: the torch optimizer.
        last_batch_iteration: the count of the last `step`; -1 before the first.

    Args:
        optimizer: a torch optimizer, or a wrapper with one as its `optimizer`.
        last_batch_iteration: the count to continue from; with -1, construction sets the first rates.
    """

    def __init__(self, optimizer: object, last_batch_iteration: int = -1):
        self.optimizer = torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float | Tensor] | None = None

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the rate of each group at `last_batch_iteration`."""

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the rates that were set last.

        Raises:
            AssertionError: none has been set yet.
        """
        if self._last_lr is None:
            raise AssertionError("need to call step() first: no learning rate has been set yet")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next count, or to the given count."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, int]:
        """Return the state of the schedule."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the state; the rates themselves are part of the optimizer's state until the next `step`."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _begin(self, rates: Sequence[float]) -> None:
        """Set the first rates, unless the schedule continues from a count."""
        if self.last_batch_iteration == -1:
            self._set(rates)

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _per_group(self, value: PerGroup, name: str) -> list[float]:
        """Return the value of each group.

        Raises:
            RateScheduleError: a list has the wrong length.
        """
        count = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * count  # type: ignore[list-item]  # a number
        if len(value) != count:
            raise RateScheduleError(
                f"`{name}` must be a number or a list with one for each of {count} parameter groups, but has "
                f"{len(value)}"
            )
        return list(value)


class WarmupSchedule(RateSchedule):
    """A schedule that starts with a warmup.

    Attributes:
        warmup: the warmup.
    """

    warmup: WarmupPhase

    @property
    def warmup_num_steps(self) -> int:
        """The number of warmup steps."""
        return self.warmup.steps

    @property
    def warmup_type(self) -> str:
        """``log`` or ``linear``."""
        return self.warmup.kind


class WarmupLR(WarmupSchedule):
    """Raises the rate along a logarithm or a line, then keeps it constant.

    Args:
        optimizer: see `RateSchedule`.
        warmup_min_lr: the rate at the start; one value, or one for each group.
        warmup_max_lr: the rate after the warmup; by default each group's own.
        warmup_num_steps: the number of warmup steps; 1 counts as 2.
        warmup_type: ``log`` or ``linear``; anything else counts as ``log``, with a warning.
        last_batch_iteration: see `RateSchedule`.

    Raises:
        RateScheduleError: `warmup_num_steps` is no positive integer, or a list has the wrong length.
    """

    def __init__(
        self,
        optimizer: object,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        self.warmup = WarmupPhase(warmup_num_steps, warmup_type)
        own = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(own if warmup_max_lr is None else warmup_max_lr, "warmup_max_lr")
        self.delta_lrs = [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        self._begin(self.get_lr())

    def get_lr(self) -> list[float]:
        share = 0.0 if self.last_batch_iteration < 0 else self._share()
        return [low + delta * share for low, delta in zip(self.min_lrs, self.delta_lrs, strict=True)]

    def _share(self) -> float:
        progress = self.warmup.progress(self.last_batch_iteration)
        return 1.0 if progress is None else progress


class WarmupDecayLR(WarmupLR):
    """Raises the rate as `WarmupLR`, then lowers it along a line to the rate at the start.

    Args:
        optimizer, warmup_min_lr, warmup_num_steps, warmup_type, last_batch_iteration: see `WarmupLR`.
        total_num_steps: the step at which the lowest rate is reached.
        warmup_max_lr: the rate after the warmup; by default 0.001, not the groups' own.
    """

    def __init__(
        self,
        optimizer: object,
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
    """Raises the rate to each group's own, then lowers it along a cosine; both ends are shares of that rate.

    Args:
        optimizer: see `RateSchedule`.
        total_num_steps: the step at which the lowest rate is reached.
        warmup_min_ratio: the share of the rate at the start.
        warmup_num_steps, warmup_type: see `WarmupLR`.
        cos_min_ratio: the share of the rate at the end.
        last_batch_iteration: see `RateSchedule`.

    Raises:
        RateScheduleError: `warmup_num_steps` is no positive integer.
    """

    def __init__(
        self,
        optimizer: object,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        self.warmup = WarmupPhase(warmup_num_steps, warmup_type)
        self.warmup.warn_if_longer(total_num_steps)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._begin(self.get_lr())

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """Return the share of each group's rate; 0 before the first step."""
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


class WarmupPhase:
    """The warmup of a schedule.

    Args:
        steps: the number of steps; 1 counts as 2.
        kind: ``log`` or ``linear``.
    """

    def __init__(self, steps: int, kind: str):
        self.steps = max(2, positive(steps, "warmup_num_steps"))
        self.kind = kind if kind in ("log", "linear") else "log"
        if kind != self.kind:
            warnings.warn(f"`warmup_type` must be log or linear, but is {kind}: log is taken", stacklevel=3)

    def progress(self, count: int) -> float | None:
        """Return the progress after `count` steps, from 0 to 1; None after the warmup."""
        if count >= self.steps:
            return None
        return count / self.steps if self.kind == "linear" else math.log(count + 1) / math.log(self.steps)

    def warn_if_longer(self, total: int) -> None:
        """Warn if the warmup is longer than the schedule."""
        if total < self.steps:
            warnings.warn(
                f"`total_num_steps` {total} is less than `warmup_num_steps` {self.steps}", stacklevel=3
            )


def positive(value: object, name: str) -> int:
    """Return a value after checking that it is a positive integer.

    Raises:
        RateScheduleError: it is not.
    """
    if not isinstance(value, int) or value <= 0:
        raise RateScheduleError(f"`{name}` must be a positive integer, but is {value!r}")
    return value


def torch_optimizer(optimizer: object) -> Optimizer:
    """Return a torch optimizer, unwrapped from its wrapper.

    Raises:
        TypeError: there is no torch optimizer.
    """
    inner = optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is no torch.optim.Optimizer and wraps none")
    return inner
