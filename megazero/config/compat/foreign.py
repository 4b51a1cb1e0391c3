"""Flags of Megatron-LM, Megatron-DeepSpeed and their launchers that are not fields of the tree.

A flag is accepted without effect only where leaving it out keeps the user's numbers and intent; it is
refused, with what to do instead, where the run would not be the one that was asked for.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from megazero.config.condition import Condition, Need
from megazero.config.fields import check_needs
from megazero.config.tables import blocks, rows

UNLIMITED = 1_000_000
"""The most values of a flag that takes any number of them."""


class Arity(NamedTuple):
    """How many values must follow a flag, and how many of the arguments after it can be its values."""

    least: int
    most: int


_SWITCH = Arity(0, 0)


_ARITIES = MappingProxyType({"": _SWITCH, "=": Arity(1, 1), "=?": Arity(0, 1), "=*": Arity(0, UNLIMITED)})


@dataclass(frozen=True)
class Foreign:
    """One foreign flag.

    Attributes:
        name: the flag.
        accepted: why it needs no effect here; None if it is refused whatever its value.
        refused: what to do instead; None if it is accepted whatever its value.
        values: the values it is accepted with, compared in lower case; empty means any (none for a switch).
            A value with a ! at its end is accepted whatever the conditions.
        arity: how many values it has.
        where: conditions on the resolved tree, of which one must hold.
        silent: whether a run says nothing about it, because the setting in `where` has its effect.
    """

    name: str
    accepted: str | None = None
    refused: str | None = None
    values: tuple[str, ...] = ()
    arity: Arity = _SWITCH
    where: tuple[Condition, ...] = ()
    silent: bool = False


@dataclass(frozen=True)
class Ignored:
    """A foreign flag that was given and has no effect here, with the reason and the row that says so."""

    name: str
    reason: str
    foreign: Foreign


def contradiction(ignored: Ignored, value_of: Callable[[str], object]) -> str | None:
    """Return why a flag is refused after all, once fields have values; None if it is not."""
    foreign = ignored.foreign
    if not foreign.where or any(condition.holds(value_of(condition.path)) for condition in foreign.where):
        return None
    return f"`{foreign.name}` is not accepted: {foreign.refused}."


def verdict(foreign: Foreign, values: Sequence[str]) -> Ignored | str:
    """Judge a foreign flag that was given `values`: Ignored, or the reason for refusing it."""
    given = " ".join([foreign.name, *values])
    if foreign.accepted is None:
        return f"`{given}` is not accepted: {foreign.refused}."
    if len(values) < foreign.arity.least:
        return f"`{foreign.name}` must be followed by a value."
    lower = {value.lower() for value in values}
    if lower and all(f"{value}!" in foreign.values for value in lower):
        return Ignored(foreign.name, foreign.accepted, replace(foreign, where=()))
    if foreign.values and not (lower and lower <= {*foreign.values}):
        return f"`{given}` is not accepted: {foreign.refused}."
    return Ignored(foreign.name, foreign.accepted, foreign)


def arity(marked: str) -> tuple[str, Arity]:
    """Split a flag from its mark, and return its name and its number of values."""
    name, equals, many = marked.partition("=")
    return name, _ARITIES[equals + many]


def _condition(text: str) -> Condition:
    """Read ``section.field=value,value`` or ``section.field``, with values as Python or as plain words."""
    path, _, values = text.partition("=")
    return Condition(path, tuple(map(_value, filter(None, values.split(",")))))


def _value(text: str) -> object:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _foreign_flags() -> Iterator[Foreign]:
    for table in ("accepted.txt", "dependent.txt"):
        for reason, flags in blocks(table):
            for name, taken in map(arity, flags):
                yield Foreign(name, accepted=reason, arity=taken)
    for reason, flags in blocks("refused.txt"):
        for name, taken in map(arity, flags):
            yield Foreign(name, refused=reason, arity=taken)
    for head, flags in blocks("absent.txt"):
        _, _, reason = head.partition(": ")  # the feature that they ask for
        for name, taken in map(arity, flags):
            yield Foreign(name, refused=reason, arity=taken)
    for row in rows("conditional.csv"):
        name, taken = arity(row["flag"])
        where = Need(tuple(map(_condition, filter(None, row["where"].split(" or ")))))
        check_needs(name, [where])
        yield Foreign(
            name,
            row["accepted"],
            row["refused"],
            tuple(row["values"].split()),
            taken,
            where.conditions,
            silent=bool(row["silent"]),
        )


def _table() -> dict[str, Foreign]:
    table: dict[str, Foreign] = {}
    for foreign in _foreign_flags():
        assert foreign.name not in table, f"{foreign.name} has two rows"
        table[foreign.name] = foreign
    return table


FOREIGN_FLAGS: Mapping[str, Foreign] = MappingProxyType(_table())
"""Flag name -> its row."""
