"""DeepSpeed's learning rate schedules by the names that its JSON gives them.

The values are DeepSpeed's at every step, including edge cases. As there, the value set at construction holds
for the first update, and the first `step` sets the rate of count 0: if warmup starts from zero, the first
two updates change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torch.optim import Optimizer

from megazero.config.deepspeed.extras import SchedulerExtras
from megazero.errors import ConfigError

_Number = TypeVar("_Number", int, float)


def learning_rate(extras: SchedulerExtras, base: float, count: int) -> float:
    """The rate after `count` + 1 calls of `step`; -1 gives the value set at construction.

    Args:
        extras: the schedule, whose `warmup_max_lr` is not None for the two types that read it.
        base: the parameter group's own rate, which WarmupCosineLR scales.
    """
    cosine = extras.type == "WarmupCosineLR"
    if count < 0:
        return 0.0 if cosine else _given(extras.warmup_min_lr)
    if cosine:
        return base * _cosine_ratio(extras, count)
    low, high = _given(extras.warmup_min_lr), _given(extras.warmup_max_lr)
    return low + (high - low) * _linear_ratio(extras, count)


def _warmup(extras: SchedulerExtras, count: int) -> float | None:
    """The progress of the warmup, from 0 to 1; None when it is over."""
    steps = max(2, _given(extras.warmup_num_steps))
    if count >= steps:
        return None
    return math.log(count + 1) / math.log(steps) if extras.warmup_type == "log" else count / steps


def _linear_ratio(extras: SchedulerExtras, count: int) -> float:
    warmup = _warmup(extras, count)
    if warmup is not None:
        return warmup
    if extras.type == "WarmupLR":
        return 1.0
    total = _given(extras.total_num_steps)
    length = total - max(2, _given(extras.warmup_num_steps))
    return max(0.0, (total - count) / max(1.0, length))


def _cosine_ratio(extras: SchedulerExtras, count: int) -> float:
    warmup = _warmup(extras, count)
    if warmup is not None:
        return extras.warmup_min_ratio + warmup * (1.0 - extras.warmup_min_ratio)
    steps = max(2, _given(extras.warmup_num_steps))
    done = min(1.0, (count - steps + 1) / max(1, _given(extras.total_num_steps) - steps))
    height = (1 + math.cos(math.pi * done)) / 2
    return max(0.0, extras.cos_min_ratio + (1.0 - extras.cos_min_ratio) * height)


def _given(number: _Number | None) -> _Number:
    assert number is not None, "`WarmupSchedule` completes or refuses a schedule"
    return number


class WarmupSchedule:
    """Moves the `lr` of an optimizer's parameter groups; the members are those of DeepSpeed's schedules.

    Args:
        optimizer: its groups are updated; their current rates are used for `warmup_max_lr` if that is unset.
        extras: the schedule's settings.

    Raises:
        ConfigError: a length is left open.
    """

    def __init__(self, optimizer: Optimizer, extras: SchedulerExtras):
        needed = ["warmup_num_steps"] + ["total_num_steps"] * (extras.type != "WarmupLR")
        missing = [name for name in needed if getattr(extras, name) is None]
        if missing:
            raise ConfigError(
                [
                    f"`scheduler.params.{name}` must be a number where a script builds the model, but is "
                    '"auto"; write it down'
                    for name in missing
                ]
            )
        self.optimizer = optimizer
        self.last_batch_iteration = -1
        low = 0.0 if extras.warmup_min_lr is None else extras.warmup_min_lr
        self._groups = []
        for group in optimizer.param_groups:
            base = float(group["lr"])
            high = base if extras.warmup_max_lr is None else extras.warmup_max_lr
            self._groups.append((replace(extras, warmup_min_lr=low, warmup_max_lr=high), base))
        self._set()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next count, or to the given one."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._set()

    def get_lr(self) -> list[float]:
        """The rate of each group."""
        return [learning_rate(extras, base, self.last_batch_iteration) for extras, base in self._groups]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedule."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. The next `step` sets the rates; until then they are part of the optimizer's."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _set(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate


def build_schedule(
    given: Any | Callable[[Optimizer], Any] | None, extras: SchedulerExtras | None, optimizer: Optimizer
) -> Any:
    """The caller's schedule, or one that its function makes from `optimizer`, or the JSON's; None for none.

    Raises:
        ConfigError: the caller's has no `step`, or the JSON's is incomplete.
    """
    if given is None:
        return None if extras is None else WarmupSchedule(optimizer, extras)
    schedule = given if hasattr(given, "step") else given(optimizer)
    if not hasattr(schedule, "step"):
        raise ConfigError(
            f"`lr_scheduler` must be a schedule with `step`, or a function that makes one from an optimizer, "
            f"but gives a {type(schedule).__name__}"
        )
    return schedule
