"""Rules about the optimizers' own settings."""

from __future__ import annotations

from megazero.config.fields import FIELD_BY_PATH, FIELDS
from megazero.config.rules.rule import Case, Rule, value_at


def _settings_of(optimizer: str) -> tuple[str, ...]:
    """The settings whose names start with an optimizer's."""
    return tuple(
        spec.path for spec in FIELDS if spec.section == "optimizer" and spec.name.startswith(f"{optimizer}_")
    )


def _are_defaults(case: Case, optimizer: str) -> bool:
    return all(value_at(case.config, path) == FIELD_BY_PATH[path].default for path in _settings_of(optimizer))


def _need(optimizer: str, title: str, *kin: str) -> Rule:
    """An optimizer's settings are for it and its kin."""
    takers = (optimizer, *kin)
    return Rule(
        f"{optimizer}_settings_need_{optimizer}",
        ("optimizer.optimizer", *_settings_of(optimizer)),
        f"{title}'s settings must be left at their defaults unless `optimizer` is {' or '.join(takers)}",
        f"add `--optimizer {optimizer}` or leave them out",
        lambda c: c.config.optimizer.optimizer in takers or _are_defaults(c, optimizer),
    )


def _scalar(case: Case) -> str | None:
    """The optimizer beside Muon, if that is the optimizer."""
    values = case.config.optimizer
    return values.muon_scalar_optimizer if values.optimizer == "muon" else None


OPTIMIZER_RULES: tuple[Rule, ...] = (
    _need("lamb", "LAMB", "onebit-lamb"),
    Rule(
        "lamb_bounds_ordered",
        ("optimizer.lamb_min_coeff", "optimizer.lamb_max_coeff"),
        "`lamb_min_coeff` must be at most `lamb_max_coeff`",
        "lower `--lamb-min-coeff`",
        lambda c: c.config.optimizer.lamb_min_coeff <= c.config.optimizer.lamb_max_coeff,
    ),
    Rule(
        "lion_settings_need_lion",
        ("optimizer.optimizer", "optimizer.muon_scalar_optimizer", *_settings_of("lion")),
        "Lion's settings must be left at their defaults unless `optimizer` is lion, or muon beside lion",
        "add `--optimizer lion` or `--muon-scalar-optimizer lion`, or leave them out",
        lambda c: "lion" in (c.config.optimizer.optimizer, _scalar(c)) or _are_defaults(c, "lion"),
    ),
    _need("adagrad", "Adagrad"),
    _need("adadelta", "Adadelta"),
    _need("rmsprop", "RMSprop"),
    _need("muon", "Muon"),
    Rule(
        "muon_quintic_in_fives",
        ("optimizer.muon_coefficient_type", "optimizer.muon_num_ns_steps"),
        "`muon_num_ns_steps` must be a multiple of 5 unless `muon_coefficient_type` is simple",
        "set `--muon-num-ns-steps 5` or `--muon-coefficient-type simple`",
        lambda c: (
            c.config.optimizer.muon_coefficient_type == "simple"
            or c.config.optimizer.muon_num_ns_steps % 5 == 0
        ),
    ),
)
