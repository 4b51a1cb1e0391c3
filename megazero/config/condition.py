"""Conditions on fields as values: `here.optimizer == "lamb"`, `config.finetune.task.is_none`.

`here` is the section that declares the setting, `config` the whole tree. Neither knows the fields while
sections are being declared: `fields.py` checks names and values once all of them are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn


@dataclass(frozen=True)
class Condition:
    """The condition that the field at `path` is one of `values` or, if there are none, that it is set.

    A switch is set if it is on, a choice if it is not `none`, and a number whatever it is.
    """

    path: str
    values: tuple[Any, ...] = ()

    def holds(self, value: Any) -> bool:
        """Whether the condition holds for this value of the field."""
        if self.values:
            return value in self.values
        return value is not None and value is not False and value not in ((), "", "none")


@dataclass(frozen=True)
class Need:
    """The need of a setting that one of some conditions holds.

    Attributes:
        conditions: the conditions.
        why: the reason, where it is not plain.
        of: the values of the setting that have this need; empty for all but its default.
    """

    conditions: tuple[Condition, ...]
    why: str = ""
    of: tuple[Any, ...] = ()

    def __or__(self, other: Need) -> Need:
        return replace(self, conditions=self.conditions + other.conditions)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "conditions must be joined by `|`, and several needs listed; neither is true by itself"
        )

    def because(self, why: str) -> Need:
        """The same need, with its reason."""
        return replace(self, why=why)

    def within(self, section: str) -> Need:
        """The same need, with the whole paths of fields of `section` itself."""
        conditions = tuple(
            replace(c, path=f"{section}{c.path}") if c.path.startswith(".") else c for c in self.conditions
        )
        return replace(self, conditions=conditions)


def when(values: Any, need: Need) -> Need:
    """The need of these values of a setting alone: of one, or of each in a tuple."""
    return replace(need, of=values if isinstance(values, tuple) else (values,))


class _Field:
    """A field, of which conditions are made."""

    def __init__(self, path: str) -> None:
        self._path = path

    def among(self, *values: Any) -> Need:
        """That the field is one of these values."""
        return Need((Condition(self._path, values),))

    def __eq__(self, value: Any) -> Need:  # type: ignore[override]
        return self.among(value)

    @property
    def is_set(self) -> Need:
        """That the field is set, as `Condition` has it."""
        return self.among()

    @property
    def is_none(self) -> Need:
        """That the field is None."""
        return self.among(None)

    @property
    def is_off(self) -> Need:
        """That the switch is off."""
        return self.among(False)


class _Section:
    """A section, whose attributes are its fields."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Field:
        return _Field(f"{self._name}.{name}")


class _Tree:
    """The tree, whose attributes are its sections."""

    def __getattr__(self, name: str) -> _Section:
        return _Section(name)


here = _Section("")
config = _Tree()
