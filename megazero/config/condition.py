"""Conditions on fields as Python values: `here.kd` (it is set), `config.model.family == "gpt"`.

`here` is the section that declares the setting, `config` the whole tree. Neither knows the fields while
sections are being declared: `fields.py` checks names and values once all of them are.
"""

from __future__ import annotations

from dataclasses import dataclass
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
        return Need(self.conditions + other.conditions)

    def __bool__(self) -> NoReturn:
        raise TypeError("a `Need` must be joined by `|` or listed, but is asked whether it is true")

    def because(self, why: str) -> Need:
        """The same need, with its reason."""
        return Need(self.conditions, why, self.of)

    def within(self, section: str) -> Need:
        """The same need, with the whole paths of fields of `section` itself."""
        whole = (section + c.path if c.path[0] == "." else c.path for c in self.conditions)
        conditions = map(Condition, whole, (c.values for c in self.conditions))
        return Need(tuple(conditions), self.why, self.of)


def when(values: Any, need: Need) -> Need:
    """The need of these values of a setting alone: of one, or of each in a tuple."""
    return Need(need.conditions, need.why, values if isinstance(values, tuple) else (values,))


class _Field(Need):
    """A field, of which conditions are made; alone, the need that it is set."""

    def __init__(self, path: str) -> None:
        super().__init__((Condition(path),))

    def among(self, *values: Any) -> Need:
        """The need that the field is one of these values."""
        return Need((Condition(self.conditions[0].path, values),))

    def __eq__(self, value: object) -> Need:  # type: ignore[override]
        return self.among(value)

    @property
    def is_none(self) -> Need:
        """The need that the field is None."""
        return self.among(None)

    @property
    def is_off(self) -> Need:
        """The need that the switch is off."""
        return self.among(False)


class _Section:
    """A section, whose attributes are its fields, as `_Field`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _Field(f"{self._name}.{name}")


class _Tree:
    """The tree, whose attributes are its sections."""

    def __getattr__(self, name: str) -> _Section:
        return _Section(name)


here = _Section("")
config = _Tree()
