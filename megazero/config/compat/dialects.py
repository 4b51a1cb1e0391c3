"""Dialects: the flags that only forks of the two Megatrons know, read as the flags here that say the same.

`config/tables/dialects/` has a file for each fork; `config/tables/families.txt` has the names by which any
trainer calls its logs, its kernels and its launch, so that such a flag stops no run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType

from megazero.config.compat.blends import weighted
from megazero.config.compat.foreign import Foreign, Ignored, arity
from megazero.config.compat.layouts import of_ends, of_layout
from megazero.config.tables import blocks, names_in
from megazero.config.words import dashed, is_flag, values_after
from megazero.errors import DataError

COMMAND = "--dialect"
"""The flag that names the fork whose line follows."""

_ANY = 1_000_000


@dataclass(frozen=True)
class Row:
    """A fork's flag, and what becomes of it.

    Attributes:
        name: the flag, with dashes.
        least: how many values must follow it.
        most: how many of the arguments after it can be its values.
        values: the values that it is about, in lower case; empty means any (none for a switch).
        same: the arguments that say the same here, with places for its values as `_filled` fills them; None
            for a flag without effect or one that is refused.
        accepted: why it needs no effect.
        refused: what to do instead.
    """

    name: str
    least: int
    most: int
    values: tuple[str, ...] = ()
    same: tuple[str, ...] | None = None
    accepted: str | None = None
    refused: str | None = None

    def fits(self, values: Sequence[str]) -> bool:
        """Whether the row is about a flag with these values."""
        if len(values) < self.least:
            return False
        if not self.values:
            return True
        return bool(values) and any(fnmatchcase(values[0].lower(), value) for value in self.values)


@dataclass
class Reading:
    """A command line in the flags of this project.

    Attributes:
        argv: its arguments.
        assumed: forks whose flags are on it, though none is named.
        ignored: flags without effect.
        problems: why it cannot be read.
        replaced: the flag of a fork, with its values -> what is read instead.
        given: every flag of the line, with dashes -> its values.
    """

    argv: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)
    given: dict[str, list[str]] = field(default_factory=dict)

    def warnings(self) -> list[str]:
        """The line on what was read as something else; none if nothing was."""
        if not self.replaced:
            return []
        pairs = "; ".join(f"`{theirs}` as `{ours}`" for theirs, ours in self.replaced.items())
        whose = f" (`{COMMAND} {self.assumed[0]}` says so)" if self.assumed else ""
        return [f"flags of a fork are read as what they mean here{whose}: {pairs}."]


def translate(argv: Sequence[str], known: Mapping[str, str]) -> Reading:
    """Read the flags of a fork, whichever it is, and write known ones as they are spelled here.

    The fork is that of `--dialect`, or else the one that knows the most of the flags that are unknown here.

    Args:
        argv: the arguments.
        known: every other flag, by its name with dashes.
    """
    reading = Reading(given=_given(argv))
    named = _named(argv, reading)
    tables = _tables(known, named, reading)
    position = 0
    while position < len(argv):
        token = argv[position]
        position += 1
        if not is_flag(token):
            reading.argv.append(token)
            continue
        _, equals, inline = token.partition("=")
        values = [inline] if equals else values_after(argv, position)
        taken = _read(reading, tables, known, token, values)
        position += 0 if equals else taken
    return reading


def _read(
    reading: Reading, tables: list[list[str]], known: Mapping[str, str], token: str, values: list[str]
) -> int:
    """Read one flag; returns how many of its values are read with it."""
    name = token.partition("=")[0]
    spelled = known.get(dashed(name))
    if dashed(name) == COMMAND:
        return len(values[:1])
    row = _row(dashed(name), values, tables, reading, is_known=spelled is not None)
    if row is None and spelled is None and _lacks_value(dashed(name), values, tables):
        reading.problems.append(f"`{name}` must be followed by a value.")
        return 0
    if row is None:
        reading.argv.append(token if spelled is None else spelled + token[len(name) :])
        return 0
    taken = values[: row.most]
    given = " ".join([name, *taken])
    if row.same is not None:
        try:
            tokens = [word for token in row.same for word in _filled(token, taken, reading.given)]
        except (DataError, ValueError, ZeroDivisionError) as error:
            reading.problems.append(f"`{given}` cannot be read: {error}")
            return len(taken)
        missing = [word for word in tokens if word.startswith("{")]
        if missing:
            reading.problems.append(
                f"`{given}` must come with `{missing[0].strip('{/}')}`, but it is missing."
            )
            return len(taken)
        reading.argv += tokens
        reading.replaced[given] = " ".join(tokens)
    elif row.accepted is not None:
        reading.ignored.append(Ignored(name, row.accepted, Foreign(name, accepted=row.accepted)))
    else:
        reading.problems.append(f"`{given}` is not accepted: {row.refused}.")
    return len(taken)


def _given(argv: Sequence[str]) -> dict[str, list[str]]:
    """Every flag, with dashes -> its values."""
    given: dict[str, list[str]] = {}
    for position, token in enumerate(argv):
        if is_flag(token):
            name, equals, inline = token.partition("=")
            given[dashed(name)] = [inline] if equals else values_after(argv, position + 1)
    return given


def _filled(token: str, values: Sequence[str], given: Mapping[str, list[str]]) -> list[str]:
    """The arguments of a place for a fork's values; one that begins with a brace lacks a flag to fill it.

    ``{}`` are the values, ``{n}`` is how many parts commas make of the first, ``{--flag}`` is the value of
    another flag and ``{/--flag}`` the first divided by that, ``{range}`` are the numbers of 5-7 9-10 and
    ``{pairs}`` those of 5 7 9 10, ``{weighted}`` is a blend of parts of datasets, ``{layout}`` and ``{ends}``
    are the arguments about the layers of stages.
    """
    first = values[0] if values else ""
    other = given.get(token.strip("{/}"), [])
    if token == "{}":
        return list(values)
    if token == "{n}":
        return [str(first.count(",") + 1)]
    if token == "{layout}":
        return of_layout(" ".join(values), given)
    if token == "{ends}":
        return of_ends(given)
    if token == "{weighted}":
        return list(weighted(" , ".join(values)))
    if token in ("{range}", "{pairs}"):
        ends = [int(end) for value in values for end in value.split("-")]
        spans = zip(ends[::2], ends[1::2], strict=False)
        return [str(number) for start, stop in spans for number in range(start, stop + 1)]
    if token.startswith("{/") and other:
        return [repr(float(first) / float(other[0]))]
    if token.startswith("{--") and other:
        return [other[0]]
    return [token.replace("{}", first)]


def _row(
    name: str, values: Sequence[str], tables: list[list[str]], reading: Reading, *, is_known: bool
) -> Row | None:
    """The row on a flag; None if none fits, or if forks that may be meant differ about it."""
    # A flag that is known here means something else only in the fork whose line this is.
    for names in tables[:1] if is_known else tables:
        meanings = {fork: row for fork in names if (row := _first(DIALECTS[fork], name, values)) is not None}
        if len(set(meanings.values())) > 1:
            if is_known:
                return None
            reading.problems.append(
                f"`{name}` means different things to {' and '.join(meanings)}; say whose line this is, such "
                f"as `{COMMAND} {next(iter(meanings))}`."
            )
        if meanings and is_known and reading.assumed and not all(row.values for row in meanings.values()):
            fork = next(iter(meanings))
            reading.problems.append(
                f"`{name}` means another thing to {fork}, of whose flags there are others; say "
                f"`{COMMAND} {fork}` if this is its line, or leave those out."
            )
            return None
        if meanings:
            return next(iter(meanings.values()))
    row = _first(SYNONYMS, name, values)
    if is_known:  # some of its values may have other names, but itself it is read as it is
        return row if row is not None and row.values else None
    return row or _of_family(name) or _turned_off(name, values)


def _lacks_value(name: str, values: Sequence[str], tables: list[list[str]]) -> bool:
    known = [DIALECTS[fork] for names in tables for fork in names] + [SYNONYMS]
    return any(row.least > len(values) for rows in known for row in rows.get(name, ()))


def _first(rows: Mapping[str, tuple[Row, ...]], name: str, values: Sequence[str]) -> Row | None:
    return next((row for row in rows.get(name, ()) if row.fits(values)), None)


def _named(argv: Sequence[str], reading: Reading) -> str | None:
    """The fork of `--dialect`; None without it."""
    for position, token in enumerate(argv):
        name, equals, inline = token.partition("=")
        if dashed(name) != COMMAND:
            continue
        fork = inline if equals else next(iter(argv[position + 1 : position + 2]), "")
        if fork.lower() in DIALECTS:
            return fork.lower()
        names = ", ".join(DIALECTS)
        reading.problems.append(f"`{COMMAND}` must be one of {names}, but is `{fork}`.")
    return None


def _tables(known: Mapping[str, str], named: str | None, reading: Reading) -> list[list[str]]:
    """The forks to ask about a flag, those first that all must agree."""
    if named is not None:
        return [[named]]
    unknown = [name for name in reading.given if name not in known and name not in SYNONYMS]
    counts = Counter(fork for fork, rows in DIALECTS.items() for name in unknown if name in rows)
    if not counts:
        return []
    most = max(counts.values())
    best = [fork for fork in DIALECTS if counts[fork] == most]
    reading.assumed = best
    return [best, [fork for fork in DIALECTS if fork not in best]]


def _rows_of(table: str) -> dict[str, tuple[Row, ...]]:
    rows: dict[str, list[Row]] = {}
    for head, words in blocks(table):
        for row in _rows(head, words, most=_ANY if "/" in table else 0):
            rows.setdefault(dashed(row.name), []).append(row)
    return {name: tuple(several) for name, several in rows.items()}


def _rows(head: str, words: Sequence[str], most: int) -> Iterator[Row]:
    """The rows of a block: `same`, `no effect: REASON` or `refused: REASON`, and words under it.

    Args:
        head, words: the block.
        most: as many values belong at least to a flag that is not read, whatever its mark says.
    """
    verb, _, reason = head.partition(": ")
    for word in words:
        theirs, _, ours = word.partition(":")
        marked, _, choices = theirs.partition("=")
        few = choices in ("", "*", "?")
        # What a value only ends with may be followed by more.
        name, least, many = arity(theirs) if few else (marked, 1, _ANY if choices[0] == "*" else 1)
        values = () if few else tuple(choices.lower().split(","))
        if verb == "same":
            yield Row(name, least, many, values, same=tuple(_tokens(ours)))
        elif verb == "no effect":
            yield Row(name, least, max(many, most), values, accepted=reason)
        else:
            assert verb == "refused", f"`{head}` of a dialect begins with no known word"
            yield Row(name, least, max(many, most), values, refused=reason)


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

SYNONYMS: Mapping[str, tuple[Row, ...]] = MappingProxyType(_rows_of("synonyms.txt"))
"""Flag of any trainer -> its rows, of which the first that fits counts."""

_FAMILIES: tuple[tuple[str, str], ...] = tuple(
    (reason, pattern) for reason, words in blocks("families.txt") for pattern in words
)


def _turned_off(name: str, values: Sequence[str]) -> Row | None:
    """The row of a flag that nobody knows, and that turns off what it would turn on."""
    is_off = len(values) == 1 and values[0].lower() in ("false", "0", "none", "off", "no")
    # A model has biases and norms, so turning those off asks for something.
    asks = (
        not name.startswith(("--use-", "--enable-", "--do-", "--with-")) or "bias" in name or "norm" in name
    )
    return Row(name, 0, 1, accepted="it is off") if is_off and not asks else None


def _of_family(name: str) -> Row | None:
    """The row of a flag that nobody knows, but whose name says that it changes no number."""
    reason = next((reason for reason, pattern in _FAMILIES if fnmatchcase(name, pattern)), None)
    return None if reason is None else Row(name, 0, _ANY, accepted=reason)
