"""Flags of Megatron-LM, Megatron-DeepSpeed and their launchers that are not fields of the tree.

A flag is accepted without effect only where leaving it out keeps the user's numbers and intent; it is
refused, with what to do instead, where the run would not be the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megazero.config.compat.accepted import ACCEPTED, CONDITIONAL
from megazero.config.compat.refused import REFUSED

_UNLIMITED = 1_000_000


@dataclass(frozen=True)
class Foreign:
    """One foreign flag.

    Attributes:
        name: the flag.
        accepted: why it needs no effect here; None if it is refused whatever its value.
        refused: what to do instead; None if it is accepted whatever its value.
        values: the values it is accepted with, compared in lower case; empty means any (none for a switch).
        most_values: how many of the arguments after it can be its values.
        beside: the flag without which it is refused.
        where: a field of the tree and the value that it must have once everything is resolved.
    """

    name: str
    accepted: str | None = None
    refused: str | None = None
    values: tuple[str, ...] = ()
    most_values: int = _UNLIMITED
    beside: str | None = None
    where: tuple[str, str] | None = None


@dataclass(frozen=True)
class Ignored:
    """A foreign flag that was given and has no effect here, with the reason and the row that says so."""

    name: str
    reason: str
    foreign: Foreign


def contradiction(ignored: Ignored, value: Any) -> str | None:
    """Why the flag is refused after all, now that its row's field has `value`; None if it is not refused."""
    foreign = ignored.foreign
    if foreign.where is None or str(value) == foreign.where[1]:
        return None
    return f"`{foreign.name}` is not accepted: {foreign.refused}."


def verdict(foreign: Foreign, values: Sequence[str], argv: Sequence[str]) -> Ignored | str:
    """What becomes of a foreign flag that was given `values`: Ignored, or the reason for refusing it."""
    given = " ".join([foreign.name, *values])
    if foreign.accepted is None:
        return f"`{given}` is not accepted: {foreign.refused}."
    if foreign.values and not (values and all(value.lower() in foreign.values for value in values)):
        return f"`{given}` is not accepted: {foreign.refused}."
    if foreign.beside and not any(token.split("=")[0] == foreign.beside for token in argv):
        return f"`{given}` is not accepted: {foreign.refused}."
    return Ignored(foreign.name, foreign.accepted, foreign)


def _accepted() -> Iterable[Foreign]:
    for reason, names in ACCEPTED.items():
        for name in names.split():
            bare = name.removesuffix("=")
            yield Foreign(bare, accepted=reason, most_values=int(name != bare))


def _conditional() -> Iterable[Foreign]:
    for name, (values, accepted, refused) in CONDITIONAL.items():
        if values.startswith("--"):
            yield Foreign(name, accepted=accepted, refused=refused, most_values=0, beside=values)
        elif "=" in values:
            path, _, value = values.partition("=")
            yield Foreign(name, accepted=accepted, refused=refused, most_values=0, where=(path, value))
        else:
            yield Foreign(name, accepted=accepted, refused=refused, values=tuple(values.split()))


def _refused() -> Iterable[Foreign]:
    for reason, names in REFUSED.items():
        for name in names.split():
            yield Foreign(name, refused=reason)


def _table() -> dict[str, Foreign]:
    table: dict[str, Foreign] = {}
    for foreign in (*_accepted(), *_conditional(), *_refused()):
        assert foreign.name not in table, f"{foreign.name} has two rows"
        table[foreign.name] = foreign
    return table


FOREIGN_FLAGS: Mapping[str, Foreign] = MappingProxyType(_table())
"""Flag name -> its row."""
