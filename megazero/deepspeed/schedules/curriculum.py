"""`CurriculumScheduler`, and the schedules that an engine passes to the module: lengths, layers to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megazero.config.pacing import Discrete, Root
from megazero.errors import ConfigError

_BOUNDS = ("min_difficulty", "max_difficulty", "schedule_type")
_NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fixed_discrete": ("difficulty", "max_step"),
        "fixed_linear": ("total_curriculum_step", "difficulty_step"),
        "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
        "custom": (),
    }
)
"""Schedule type -> the required keys of `schedule_config`."""


class CurriculumScheduler:
    """The difficulty of samples at each step, by one metric of the section ``curriculum_learning``.

    `fixed_linear` and `fixed_root` grow from the lowest to the highest difficulty in multiples of
    `difficulty_step`; `fixed_discrete` has a list of levels; `custom` calls a function.

    Args:
        config: the section of the metric.

    Raises:
        ConfigError: a key is missing, or the schedule is unknown.
    """

    def __init__(self, config: Mapping[str, Any]):
        _check(config, _BOUNDS, "the section")
        kind, details = config["schedule_type"], config.get("schedule_config", {})
        if kind not in _NEEDED:
            raise ConfigError(f"`schedule_type` must be one of {', '.join(_NEEDED)}, but is {kind}")
        _check(details, _NEEDED[kind], "`schedule_config`")
        if kind == "fixed_discrete" and len(details["difficulty"]) != len(details["max_step"]) + 1:
            raise ConfigError(
                "`difficulty` must have one level more than `max_step`, but they have "
                f"{len(details['difficulty'])} and {len(details['max_step'])}"
            )
        self.state: dict[str, Any] = {name: config[name] for name in _BOUNDS} | {"schedule": details}
        self.state["current_difficulty"] = config["min_difficulty"]
        self.custom_get_difficulty: Callable[[int], int] | None = None

    def get_difficulty(self, global_steps: int) -> int:
        """Return the difficulty at a step.

        Raises:
            ConfigError: the schedule is custom, and no function has been set.
        """
        state, details, kind = self.state, self.state["schedule"], self.state["schedule_type"]
        if kind == "custom":
            return _call(self.custom_get_difficulty, global_steps)
        if kind == "fixed_discrete":
            return int(Discrete(details["difficulty"], details["max_step"]).at(global_steps))
        low, high, total = state["min_difficulty"], state["max_difficulty"], details["total_curriculum_step"]
        growth = Root(low, high, total, details["difficulty_step"], details.get("root_degree", 1))
        return int(growth.at(global_steps))

    def update_difficulty(self, global_steps: int) -> int:
        """Advance to a step; return its difficulty, which stays at the maximum once reached."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.set_current_difficulty(self.get_difficulty(global_steps))
        return self.get_current_difficulty()

    def get_current_difficulty(self) -> int:
        """Return the current difficulty."""
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, difficulty: int) -> None:
        """Set the current difficulty."""
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Set the function of a custom schedule: step -> difficulty."""
        self.custom_get_difficulty = schedule_function

    def get_state(self) -> dict[str, Any]:
        """Return the state."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned."""
        self.state = state


@dataclass(frozen=True)
class ScriptLengths:
    """The sequence lengths of a custom curriculum, by the script's function."""

    function: Callable[[int], int] | None = None

    def at(self, step: int) -> int:
        """Return the length at a step, counted from 1.

        Raises:
            ConfigError: the script has set no function.
        """
        return _call(self.function, step)


def _call(function: Callable[[int], int] | None, step: int) -> int:
    if function is None:
        raise ConfigError(
            "`schedule_type` must not be custom without a function, but none is set; call "
            "`set_custom_curriculum_learning_schedule`, or `set_custom_get_difficulty` of a scheduler"
        )
    return int(function(step))


def _check(section: Mapping[str, object], keys: tuple[str, ...], where: str) -> None:
    if missing := [key for key in keys if key not in section]:
        raise ConfigError(f"{where} must have {', '.join(missing)}, but has not; add them")


@dataclass(frozen=True)
class LayerDropSchedule:
    """The share of layers to keep in progressive layer dropping: it decays exponentially from 1 to `theta`.

    Attributes:
        theta: the limit of the share.
        gamma: the rate of the decay per step.
    """

    theta: float
    gamma: float

    def kept(self, steps: int) -> float:
        """Return the share after `steps` steps; as in DeepSpeed, it is 1 in the first two."""
        return (1.0 - self.theta) * math.exp(-self.gamma * max(steps - 1, 0)) + self.theta

    def arguments(self, steps: int) -> dict[str, float]:
        """Return the keyword arguments for the module's forward in training."""
        return {"progressive_layer_drop": True, "pld_theta": self.kept(steps)}


def layer_drop_of(values: Mapping[str, Any]) -> LayerDropSchedule | None:
    """Read the schedule from a JSON's settings by path; None if it is off."""
    if not values.get("skipping.progressive_layer_drop"):
        return None
    return LayerDropSchedule(float(values["skipping.pld_theta"]), float(values["skipping.pld_gamma"]))
