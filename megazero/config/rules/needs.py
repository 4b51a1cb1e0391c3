"""The one rule of all settings that need others: each declares its needs by `option`."""

from __future__ import annotations

from collections.abc import Iterator

from megazero.config.condition import Condition, Need
from megazero.config.derive import EXPERT_FIELDS
from megazero.config.fields import FIELD_BY_PATH, FIELDS, FieldSpec, Kind, spoken
from megazero.config.rules.rule import display_name, say, value_at
from megazero.config.rules.sound import Unsound
from megazero.config.tree.config import Config

_FEW = 4
_NEEDY = tuple(spec for spec in FIELDS if spec.needs)


def unmet_needs(config: Config) -> Iterator[tuple[str, str]]:
    """Yield rule name and sentence for each setting that is given without what it needs."""
    for spec in _NEEDY:
        try:
            given = getattr(config, spec.section).model_fields_set
        except Unsound:
            continue
        if spec.name in given:
            yield from _unmet(config, spec)


def _unmet(config: Config, spec: FieldSpec) -> Iterator[tuple[str, str]]:
    for need in spec.needs:
        try:
            if _counts(config, spec, need.of) and not any(
                condition.holds(value_at(config, condition.path)) for condition in need.conditions
            ):
                yield f"needs_of_{spec.name}", _sentence(config, spec, need)
        except Unsound:
            continue


def _counts(config: Config, spec: FieldSpec, of: tuple[object, ...]) -> bool:
    """Whether a need applies: the field has a value of `of` or, without any, not its default."""
    value = value_at(config, spec.path)
    if value not in of if of else value == spec.default:
        return False
    # Without experts, settings about them have no meaning, whatever their values.
    return spec.section != "model" or spec.name not in EXPERT_FIELDS or bool(config.model.num_experts)


def _sentence(config: Config, spec: FieldSpec, need: Need) -> str:
    value = value_at(config, spec.path)
    given = {True: "", False: " off"}[value] if isinstance(value, bool) else f" {spoken(value)}"
    facts = " and ".join(f"`{display_name(c.path)}` {say(value_at(config, c.path))}" for c in need.conditions)
    return (
        f"{must(need)} with `{display_name(spec.path)}`{given}, but {facts}; {_remedy(spec, need)}"
        f"{need.why and ': ' + need.why} [rule needs_of_{spec.name}]."
    )


def must(need: Need) -> str:
    """Return the sentence on what must hold, such as "`optimizer` must be lamb or onebit-lamb"."""
    return " or ".join(f"`{display_name(c.path)}` must be {_wanted(c)}" for c in need.conditions)


def _wanted(condition: Condition) -> str:
    spec = FIELD_BY_PATH[condition.path]
    if spec.kind is Kind.BOOL:
        return "off" if condition.values == (False,) else "on"
    if condition.values in ((None,), ((),)):
        return "left out"
    values = tuple(map(str, condition.values)) or _choices(spec)
    return " or ".join(filter(None, (", ".join(values[:-1]), *values[-1:]))) or "set"


def _choices(spec: FieldSpec) -> tuple[str, ...]:
    """The choices of a field other than `none`, if there are few of them."""
    choices = tuple(str(choice) for choice in spec.choices if choice != "none")
    return choices if spec.kind is Kind.CHOICE and len(choices) <= _FEW else ()


def _remedy(spec: FieldSpec, need: Need) -> str:
    flags: dict[bool, list[str]] = {True: [], False: []}
    for condition in need.conditions:
        other = FIELD_BY_PATH[condition.path]
        left_out = condition.holds(other.default)
        values = () if left_out or other.kind is Kind.BOOL else (condition.values or _choices(other))[:2]
        flags[left_out] += [f"`{flag}`" for flag in _as_flags(other, values)]
    leave = f"leave {' or '.join([*flags[True], f'`{spec.flag}`'])} out"
    return ", or ".join([f"add {' or '.join(flags[False])}", leave] if flags[False] else [leave])


def _as_flags(spec: FieldSpec, values: tuple[object, ...]) -> list[str]:
    """The flags that set a field to one of these values: `--fp16`, `--zero-stage 3`; or its own flag."""
    switches = [f"--{value}" for value in values]
    if values and spec.switches.keys() >= set(switches):
        return switches
    return [f"{spec.flag} {value}" for value in values] or [spec.flag]
