"""Building the schedule that a caller passes or a JSON names, and DeepSpeed's flags of schedules."""

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
from megazero.deepspeed.schedules.one_cycle import LRRangeTest, OneCycle
from megazero.deepspeed.schedules.warmup import RateSchedule, WarmupCosineLR, WarmupDecayLR, WarmupLR
from megazero.errors import ConfigError

SCHEDULES: Mapping[str, type[RateSchedule]] = MappingProxyType(
    {kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
)
"""DeepSpeed's schedules by name."""


def __getattr__(name: str) -> list[str]:
    if name == "VALID_LR_SCHEDULES":
        return list(SCHEDULES)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_schedule(
    given: Any,
    named: Named | None,
    optimizer: Optimizer,
    client: Optimizer,
) -> Any:
    """Return the caller's schedule, or else the JSON's; None without either.

    Args:
        given: the caller's schedule, or a function that makes it from `client`; takes precedence.
        named: the JSON's schedule, which is made from `optimizer`.
        optimizer: the engine's optimizer.
        client: the optimizer inside of it, which has the same parameter groups.

    Raises:
        ConfigError: the caller's schedule has no `step`, or the JSON's is unknown or has wrong arguments.
    """
    if given is None:
        return None if named is None else of_json(named, optimizer)
    schedule = given if hasattr(given, "step") else given(client)
    if isinstance(given, LRScheduler) and given.optimizer.param_groups is not client.param_groups:
        warnings.warn(
            "`lr_scheduler` should be of the optimizer that the engine uses, but is of another one, so that "
            "its rates have no effect; pass that optimizer as `optimizer`, or a function that makes the "
            "schedule",
            stacklevel=2,
        )
    if not hasattr(schedule, "step"):
        raise ConfigError(
            f"`lr_scheduler` must be a schedule with `step`, or a function that makes one from an optimizer, "
            f"but gives a {type(schedule).__name__}"
        )
    return schedule


def of_json(named: Named, optimizer: Optimizer) -> Any:
    """Build the schedule of DeepSpeed's or torch's that a JSON names.

    Raises:
        ConfigError: the schedule is unknown, or takes other arguments.
    """
    kind: Any = SCHEDULES.get(named.type) or getattr(torch.optim.lr_scheduler, named.type, None)
    is_class = inspect.isclass(kind)
    if not is_class or not callable(getattr(kind, "step", None)):
        raise ConfigError(
            f"`scheduler.type` must be {', '.join(SCHEDULES)} or a class of torch.optim.lr_scheduler, but is "
            f"{named.type}"
        )
    unresolved = [name for name, value in named.params.items() if value == AUTO]
    if unresolved:
        raise ConfigError(
            [
                f"`scheduler.params.{name}` must be a number where a script builds the model, but is "
                '"auto"; write it down'
                for name in unresolved
            ]
        )
    fit(kind, named.params, "scheduler", named.type)
    return kind(optimizer, **named.params)


def fit(kind: Callable[..., object], params: Mapping[str, object], section: str, name: str) -> None:
    """Check that a class takes the arguments of a JSON.

    Raises:
        ConfigError: lists all unknown and missing arguments.
    """
    arguments = list(inspect.signature(kind).parameters.values())[1:]
    if any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
        return
    known = [argument for argument in arguments if argument.kind is not argument.VAR_POSITIONAL]
    names = [argument.name for argument in known]
    needed = [argument.name for argument in known if argument.default is argument.empty]
    problems = [
        f"`{section}.params.{key}` must not be given with {name}; leave it out (it takes {', '.join(names)})"
        for key in params
        if key not in names
    ]
    problems += [
        f"`{section}.params.{key}` must be given with {name}, but is missing"
        for key in needed
        if key not in params
    ]
    if problems:
        raise ConfigError(problems)


_FLAGS: Mapping[str, tuple[float | str, str]] = MappingProxyType(
    {
        "lr_range_test_min_lr": (0.001, "first learning rate of LRRangeTest"),
        "lr_range_test_step_rate": (1.0, "growth of the learning rate in LRRangeTest"),
        "lr_range_test_step_size": (1000, "steps in which it grows by that"),
        "lr_range_test_staircase": (False, "let it grow in stairs"),
        "cycle_first_step_size": (1000, "steps of OneCycle's first half"),
        "cycle_first_stair_count": (-1, "stairs in OneCycle's first half"),
        "cycle_second_step_size": (-1, "steps of OneCycle's second half; -1 for as many as in the first"),
        "cycle_second_stair_count": (-1, "stairs in OneCycle's second half"),
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
"""Flag -> DeepSpeed's default, which differs from that of the class, and the help text."""


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
    """Parse the flags of schedules on this command line; return them and the remaining words."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, object] | None, str | None]:
    """Return the section `scheduler` that flags describe, or None and the reason.

    A size of -1, the default of `--cycle_second_step_size`, is left out.
    """
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    params: dict[str, object] = {}
    _override(args, params, *inspect.signature(SCHEDULES[name]).parameters)
    return {"type": name, "params": params}, None


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, object]) -> None:
    """Override LRRangeTest's arguments by flags, in place."""
    _override(args, params, *inspect.signature(LRRangeTest).parameters)


def override_1cycle_params(args: argparse.Namespace, params: dict[str, object]) -> None:
    """Override OneCycle's arguments by flags, in place."""
    _override(args, params, *inspect.signature(OneCycle).parameters)


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, object]) -> None:
    """Override WarmupLR's arguments by flags, in place."""
    _override(args, params, *inspect.signature(WarmupLR).parameters)


def override_params(args: argparse.Namespace, params: dict[str, object]) -> None:
    """Override the arguments of these three schedules by flags, in place."""
    for override in (override_lr_range_test_params, override_1cycle_params, override_warmupLR_params):
        override(args, params)


def _override(args: argparse.Namespace, params: dict[str, object], *names: str) -> None:
    values = {name: getattr(args, name, None) for name in names if name in _FLAGS}
    params.update({name: value for name, value in values.items() if value is not None and value != -1})


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the highest learning rate in a section `scheduler`, or None and the reason."""
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
