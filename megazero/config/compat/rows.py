"""The tables of dialects: what becomes of each flag of a fork, and of names that any trainer uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType

from megazero.config.compat.foreign import FOREIGN_FLAGS, UNLIMITED, arity
from megazero.config.tables import blocks, names_in
from megazero.config.words import dashed, nearest

_LEFT_OUT = "left out"


@dataclass(frozen=True)
class When:
    """The values of a flag, and the other flags of the line, to which a row applies.

    Attributes:
        least: how many values must follow the flag.
        values: the values that it is about, in lower case; empty means any (none for a switch).
        beside: flags, or flags with a value, of which one must be on the line too; empty for none.
    """

    least: int
    values: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def fits(self, values: Sequence[str], given: Mapping[str, list[str]]) -> bool:
        """Whether the row applies to these values, on a line with these flags."""
        if len(values) < self.least or not self.is_beside(given):
            return False
        if not self.values:
            return True
        return bool(values) and any(fnmatchcase(values[0].lower(), value) for value in self.values)

    def is_beside(self, given: Mapping[str, list[str]]) -> bool:
        """Whether one of the flags in `beside` is on the line; true if there are none."""
        pairs = [flag.partition("=")[::2] for flag in self.beside]
        return not pairs or any(
            name in given and (not value or [value] == [word.lower() for word in given[name]])
            for name, value in pairs
        )


@dataclass(frozen=True)
class Row:
    """A fork's flag, and what becomes of it.

    Attributes:
        name: the flag, with dashes.
        when: which of its values, and what else on the line, the row is about.
        most: how many of the arguments after it can be its values.
        switch: whether the flag means something by being there, whatever may follow it.
        same: the arguments that say the same here, with places for its values as `_filled` fills them; None
            for a flag without effect or one that is refused.
        accepted: why it needs no effect.
        refused: what to do instead.
    """

    name: str
    when: When
    most: int
    switch: bool = False
    same: tuple[str, ...] | None = None
    accepted: str | None = None
    refused: str | None = None


def first(
    rows: Mapping[str, tuple[Row, ...]], name: str, values: Sequence[str], given: Mapping[str, list[str]]
) -> Row | None:
    """The first of a flag's rows that fits; None if none does."""
    return next((row for row in rows.get(name, ()) if row.when.fits(values, given)), None)


def _rows_of(table: str) -> dict[str, tuple[Row, ...]]:
    rows: dict[str, list[Row]] = {}
    for head, words in blocks(table):
        if head == _LEFT_OUT:
            continue
        for row in _rows(head, words, most=UNLIMITED if "/" in table else 0):
            rows.setdefault(dashed(row.name), []).append(row)
    return {name: tuple(several) for name, several in rows.items()}


def _rows(head: str, words: Sequence[str], most: int) -> Iterator[Row]:
    """The rows of a block: `same`, `no effect: REASON`, `refused: REASON` or `left out`, and words under it.

    Args:
        head, words: the block.
        most: the least number of values that are skipped with a flag without effect, whatever its mark.
    """
    verb, _, reason = head.partition(": ")
    for word in words:
        theirs, _, ours = word.partition(":")
        ours, _, beside = ours.partition("&")
        marked, _, choices = theirs.partition("=")
        few = choices in ("", "*", "?")
        # A pattern that begins with a star is of the last value, and others may come before it.
        if few:
            name, (least, many) = arity(theirs)
        else:
            name, least, many = marked, 1, UNLIMITED if choices[0] == "*" else 1
        values = () if few else tuple(choices.lower().split(","))
        switch, when = few and many == 0, When(least, values, tuple(filter(None, beside.split("|"))))
        if verb in ("same", _LEFT_OUT):
            yield Row(name, when, many, switch, same=tuple(_tokens(ours)))
        elif verb == "no effect":
            yield Row(name, when, max(many, most), switch, accepted=reason)
        else:
            assert verb == "refused", f"`{head}` of a dialect begins with no known word"
            yield Row(name, when, max(many, most), refused=reason)


def _tokens(ours: str) -> Iterator[str]:
    """The arguments of `--a=1+--b={}`."""
    for part in ours.split("+"):
        flag, equals, value = part.partition("=")
        yield flag
        if equals:
            yield value


DIALECTS: Mapping[str, Mapping[str, tuple[Row, ...]]] = MappingProxyType(
    {name: MappingProxyType(_rows_of(f"dialects/{name}.txt")) for name in names_in("dialects")}
)
"""Every fork: name -> flag -> its rows, of which the first that fits counts."""

LEFT_OUT: Mapping[str, tuple[Row, ...]] = MappingProxyType(
    {
        name: tuple(
            row
            for head, words in blocks(f"dialects/{name}.txt")
            if head == _LEFT_OUT
            for row in _rows(head, words, most=0)
        )
        for name in DIALECTS
    }
)
"""Every fork: name -> its flags that have another default there, with what a line without them means."""

SYNONYMS: Mapping[str, tuple[Row, ...]] = MappingProxyType(_rows_of("synonyms.txt"))
"""Flag of any trainer -> its rows, of which the first that fits counts."""

_FAMILIES: tuple[tuple[str, str], ...] = tuple(
    (reason, pattern) for reason, words in blocks("families.txt") for pattern in words
)
_FAMILY_NAMES = frozenset(pattern for _, pattern in _FAMILIES if "*" not in pattern)


_MEANT: tuple[str, ...] = tuple(
    name
    for rows in (SYNONYMS, *DIALECTS.values())
    for name, several in rows.items()
    if any(row.accepted is None for row in several)
)
"""Flags of other trainers that change something or are refused."""


def of_family(name: str, known: Mapping[str, str]) -> Row | None:
    """The row of an unknown flag whose name says that it changes no number; None for another name.

    A name close to that of a flag with an effect counts as a misspelling of it, and has no row.
    """
    reason = next((reason for reason, pattern in _FAMILIES if fnmatchcase(name, pattern)), None)
    if reason is None or (name not in _FAMILY_NAMES and nearest(name, _meaningful(known))):
        return None
    return Row(name, When(0), UNLIMITED, accepted=reason)


def _meaningful(known: Mapping[str, str]) -> list[str]:
    """The flags, by their names with dashes, that have an effect or may be refused."""
    foreign = [FOREIGN_FLAGS.get(spelled) for spelled in known.values()]
    matter = [row is None or row.accepted is None or bool(row.values or row.where) for row in foreign]
    return [name for name, matters in zip(known, matter, strict=True) if matters] + [*_MEANT]
