"""Conditions on fields, written as Python values: `here.kd` (is set), `config.model.family == "gpt"`.

`here` is the section that declares the setting, and `config` is the whole tree. Both take any name while
sections are being declared; `fields.py` checks the names and values afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Condition:
    """A condition: the field at `path` has one of `values` or, if there are no values, is set.

    A switch is set if it is on, a choice if it is not `none`, and a number always.
    """

    path: str
    values: tuple[object, ...] = ()

    def holds(self, value: object) -> bool:
        """Whether the condition holds for this value of the field."""
        if self.values:
            return value in self.values
        return value is not None and value is not False and value not in ((), "", "none")


@dataclass(frozen=True)
class Need:
    """A requirement of a setting: at least one of the conditions must hold.

    Attributes:
        conditions: the conditions.
        why: the reason, for the message.
        of: the values of the setting that have this requirement; empty for all values but the default.
    """

    conditions: tuple[Condition, ...]
    why: str = ""
    of: tuple[object, ...] = ()

    def __or__(self, other: Need) -> Need:
        return Need(self.conditions + other.conditions)

    def __bool__(self) -> NoReturn:
        raise TypeError("a `Need` must be joined by `|` or listed, but is asked whether it is true")

    def because(self, why: str) -> Need:
        """Add the reason."""
        return Need(self.conditions, why, self.of)

    def within(self, section: str) -> Need:
        """Complete the paths that begin with `here`: `.kd` becomes `distillation.kd`."""
        whole = (section + c.path if c.path[0] == "." else c.path for c in self.conditions)
        conditions = map(Condition, whole, (c.values for c in self.conditions))
        return Need(tuple(conditions), self.why, self.of)


def when(values: object, need: Need) -> Need:
    """Limit a requirement to one value of the setting, or to the values of a tuple."""
    return Need(need.conditions, need.why, values if isinstance(values, tuple) else (values,))


class _Field(Need):
    """A field in a condition; by itself it requires that the field is set."""

    def __init__(self, path: str) -> None:
        super().__init__((Condition(path),))

    def among(self, *values: object) -> Need:
        """Require one of these values."""
        return Need((Condition(self.conditions[0].path, values),))

    def __eq__(self, value: object) -> Need:  # type: ignore[override]
        return self.among(value)

    @property
    def is_none(self) -> Need:
        """Require None."""
        return self.among(None)

    @property
    def is_off(self) -> Need:
        """Require the switch to be off."""
        return self.among(False)


class _Fields:
    """A section; its attributes are its fields."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _Field(f"{self._name}.{name}")


class _Sections:
    """The tree; its attributes are its sections."""

    def __getattr__(self, name: str) -> _Fields:
        return _Fields(name)


here = _Fields("")
config = _Sections()
