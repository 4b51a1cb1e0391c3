"""Rules about the optimizers' own settings."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.fields import FIELD_BY_PATH, FIELDS
from megazero.config.rules.rule import Case, Rule, value_at


def _settings_of(optimizer: str) -> tuple[str, ...]:
    """The settings whose names start with an optimizer's."""
    return tuple(
        spec.path for spec in FIELDS if spec.section == "optimizer" and spec.name.startswith(f"{optimizer}_")
    )


def _need(optimizer: str, title: str, used: Callable[[Case], bool] | None = None) -> Rule:
    """An optimizer's settings are not for others; `used` says where they are read, if not with it alone."""
    paths = _settings_of(optimizer)

    def holds(case: Case) -> bool:
        reads = case.config.optimizer.optimizer == optimizer if used is None else used(case)
        return reads or all(value_at(case.config, path) == FIELD_BY_PATH[path].default for path in paths)

    return Rule(
        f"{optimizer}_settings_need_{optimizer}",
        ("optimizer.optimizer", *paths),
        f"{title}'s settings must be left at their defaults unless `optimizer` is {optimizer}",
        f"add `--optimizer {optimizer}` or leave them out",
        holds,
    )


OPTIMIZER_RULES: tuple[Rule, ...] = (
    _need("lamb", "LAMB"),
    Rule(
        "lamb_bounds_ordered",
        ("optimizer.lamb_min_coeff", "optimizer.lamb_max_coeff"),
        "`lamb_min_coeff` must be at most `lamb_max_coeff`",
        "lower `--lamb-min-coeff`",
        lambda c: c.config.optimizer.lamb_min_coeff <= c.config.optimizer.lamb_max_coeff,
    ),
    _need("lion", "Lion"),
    _need("adagrad", "Adagrad"),
    _need("adadelta", "Adadelta"),
    _need("rmsprop", "RMSprop"),
)
