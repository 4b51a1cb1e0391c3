"""The schedule that a caller passes, or that a JSON names; and DeepSpeed's flags of schedules."""

from __future__ import annotations

import argparse
import inspect
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from megazero.config.deepspeed.extras import Named
from megazero.config.deepspeed.section import AUTO
from megazero.deepspeed.schedules.one_cycle import OneCycle
from megazero.deepspeed.schedules.warmup import (
    LRRangeTest,
    RateSchedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from megazero.errors import ConfigError

SCHEDULES: Mapping[str, type[RateSchedule]] = MappingProxyType(
    {kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
)
"""DeepSpeed's schedules by name."""


def __getattr__(name: str) -> Any:
    if name == "VALID_LR_SCHEDULES":
        return list(SCHEDULES)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_schedule(
    given: Any | Callable[[Optimizer], Any] | None,
    named: Named | None,
    optimizer: Optimizer,
    client: Optimizer,
) -> Any:
    """The caller's schedule, or one that its function makes, or the JSON's; None for none.

    Args:
        given: the schedule, or a function that makes it from `client`; takes precedence over the JSON's.
        named: describes the JSON's, which is made from `optimizer`.
        optimizer: the engine's optimizer.
        client: the optimizer inside it, which has the same groups.

    Raises:
        ConfigError: the caller's has no `step`, or the JSON's is unknown or has wrong arguments.
    """
    if given is None:
        return None if named is None else of_json(named, optimizer)
    schedule = given if hasattr(given, "step") else given(client)
    if isinstance(given, LRScheduler) and given.optimizer.param_groups is not client.param_groups:
        warnings.warn(
            "`lr_scheduler` should be of the optimizer that the engine uses, but is of another, whose rates "
            "nothing reads; pass that optimizer as `optimizer`, or a function that makes the schedule",
            stacklevel=2,
        )
    if not hasattr(schedule, "step"):
        raise ConfigError(
            f"`lr_scheduler` must be a schedule with `step`, or a function that makes one from an optimizer, "
            f"but gives a {type(schedule).__name__}"
        )
    return schedule


def of_json(named: Named, optimizer: Optimizer) -> Any:
    """The schedule of DeepSpeed's or torch's that a JSON names.

    Raises:
        ConfigError: there is no such schedule, or it takes other arguments.
    """
    known = SCHEDULES.get(named.type) or getattr(torch.optim.lr_scheduler, named.type, None)
    kind: Any = known
    if not inspect.isclass(known) or not callable(getattr(kind, "step", None)):
        raise ConfigError(
            f"`scheduler.type` must be {', '.join(SCHEDULES)} or a class of torch.optim.lr_scheduler, but is "
            f"{named.type}"
        )
    left_open = [name for name, value in named.params.items() if value == AUTO]
    if left_open:
        raise ConfigError(
            [
                f"`scheduler.params.{name}` must be a number where a script builds the model, but is "
                '"auto"; write it down'
                for name in left_open
            ]
        )
    fit(kind, named.params, "scheduler", named.type)
    made: Any = kind(optimizer, **named.params)
    return made


def fit(kind: Any, params: Mapping[str, Any], section: str, name: str) -> None:
    """Refuse arguments of a JSON that a class does not take, and those that it lacks.

    Raises:
        ConfigError: names them all.
    """
    signature = inspect.signature(kind).parameters.values()
    takes = {
        argument.name: argument
        for argument in list(signature)[1:]
        if argument.kind is not argument.VAR_POSITIONAL
    }
    if any(argument.kind is argument.VAR_KEYWORD for argument in takes.values()):
        return
    strange = [key for key in params if key not in takes]
    lacking = [
        key for key, argument in takes.items() if argument.default is argument.empty and key not in params
    ]
    problems = [
        f"`{section}.params.{key}` must not be given with {name}; leave it out (it takes {', '.join(takes)})"
        for key in strange
    ]
    problems += [f"`{section}.params.{key}` must be given with {name}, but is missing" for key in lacking]
    if problems:
        raise ConfigError(problems)


_FLAGS: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "lr_range_test_min_lr": (0.001, "first learning rate of LRRangeTest"),
        "lr_range_test_step_rate": (1.0, "growth of the learning rate in LRRangeTest"),
        "lr_range_test_step_size": (1000, "steps in which it grows by that"),
        "lr_range_test_staircase": (False, "let it grow in stairs"),
        "cycle_first_step_size": (1000, "steps of OneCycle's way up"),
        "cycle_first_stair_count": (-1, "its stairs"),
        "cycle_second_step_size": (-1, "steps of OneCycle's way down; -1 for as many as up"),
        "cycle_second_stair_count": (-1, "its stairs"),
        "decay_step_size": (1000, "steps of one interval of OneCycle's decay"),
        "cycle_min_lr": (0.01, "OneCycle's lowest learning rate"),
        "cycle_max_lr": (0.1, "OneCycle's highest learning rate"),
        "decay_lr_rate": (0.0, "decay of the learning rate after OneCycle's cycle"),
        "cycle_momentum": (False, "let the momentum cycle"),
        "cycle_min_mom": (0.8, "OneCycle's lowest momentum"),
        "cycle_max_mom": (0.9, "OneCycle's highest momentum"),
        "decay_mom_rate": (0.0, "growth of the momentum after OneCycle's cycle"),
        "warmup_min_lr": (0.0, "learning rate at the start of the warmup"),
        "warmup_max_lr": (0.001, "learning rate after the warmup"),
        "warmup_num_steps": (1000, "steps of the warmup"),
        "warmup_type": ("log", "log or linear"),
        "warmup_min_ratio": (0.01, "share of the learning rate at the start of WarmupCosineLR's warmup"),
        "cos_min_ratio": (0.01, "share of the learning rate at the end of WarmupCosineLR"),
    }
)
"""Flag -> DeepSpeed's default of it, which is not that of the class, and its help."""


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's flags of schedules, which `get_config_from_args` reads."""
    group = parser.add_argument_group("Learning rate schedule", "DeepSpeed's schedules")
    group.add_argument("--lr_schedule", default=None, help=f"one of {', '.join(SCHEDULES)}")
    for name, (default, text) in _FLAGS.items():
        if isinstance(default, bool):
            group.add_argument(f"--{name}", action="store_true", help=text)
        else:
            group.add_argument(f"--{name}", type=type(default), default=default, help=text)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The flags of schedules on this command line, and its other words."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """The section `scheduler` that flags describe, or None and the reason.

    -1, the default of `--cycle_second_step_size`, leaves a size out.
    """
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    params: dict[str, Any] = {}
    _override(args, params, *inspect.signature(SCHEDULES[name]).parameters)
    return {"type": name, "params": params}, None


def override_lr_range_test_params(args: Any, params: dict[str, Any]) -> None:
    """Put what flags say of LRRangeTest into the arguments of a schedule."""
    _override(args, params, *inspect.signature(LRRangeTest).parameters)


def override_1cycle_params(args: Any, params: dict[str, Any]) -> None:
    """Put what flags say of OneCycle into the arguments of a schedule."""
    _override(args, params, *inspect.signature(OneCycle).parameters)


def override_warmupLR_params(args: Any, params: dict[str, Any]) -> None:
    """Put what flags say of WarmupLR into the arguments of a schedule."""
    _override(args, params, *inspect.signature(WarmupLR).parameters)


def override_params(args: Any, params: dict[str, Any]) -> None:
    """Put what flags say of these three into the arguments of a schedule."""
    for override in (override_lr_range_test_params, override_1cycle_params, override_warmupLR_params):
        override(args, params)


def _override(args: Any, params: dict[str, Any], *names: str) -> None:
    given = {name: getattr(args, name, None) for name in names if name in _FLAGS}
    params.update({name: value for name, value in given.items() if value is not None and value != -1})


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[Any, str]:
    """The highest learning rate that a section `scheduler` names, or None and the reason."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    kind, params = config["type"], config["params"]
    if kind not in SCHEDULES:
        return None, f"{kind} is not a valid LR schedule"
    keys = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}
    if kind == "WarmupCosineLR":
        return None, f"{kind} scales the optimizer's learning rate, and names none"
    return params[keys.get(kind, "warmup_max_lr")], ""
