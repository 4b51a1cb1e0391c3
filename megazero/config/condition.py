"""Conditions on fields, as options and tables write them: `zero.stage=1,2,3`, `finetune.task=None`, `kd`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Condition:
    """The condition that the field at `path` is one of `values` or, if there are none, that it is set.

    A switch is set if it is on, a choice if it is not `none`, and a number whatever it is.
    """

    path: str
    values: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str, section: str = "") -> Condition:
        """Read ``field=value,value`` or ``field``; a field of another section is written with it."""
        path, _, values = text.partition("=")
        return cls(path if "." in path else f"{section}.{path}", tuple(filter(None, values.split(","))))

    def holds(self, value: Any) -> bool:
        """Whether the condition holds for this value of the field."""
        if self.values:
            return str(value) in self.values
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
    of: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str, section: str) -> Need:
        """Read ``value,value => condition or condition: the reason``."""
        of, _, rest = text.rpartition(" => ")
        conditions, _, why = rest.partition(": ")
        read = tuple(Condition.read(part, section) for part in conditions.split(" or "))
        return cls(read, why, tuple(filter(None, of.split(","))))
