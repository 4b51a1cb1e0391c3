"""Dialects: the flags that only forks of the two Megatrons know, read as the flags here that say the same.

`config/tables/dialects/` has a file for each fork; `config/tables/families.txt` has the names by which any
trainer calls its logs, its kernels and its launch, so that such a flag stops no run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megazero.config.compat.blends import weighted
from megazero.config.compat.foreign import Foreign, Ignored
from megazero.config.compat.layouts import of_ends, of_evaluations, of_layout, of_split
from megazero.config.compat.rows import DIALECTS, LEFT_OUT, SYNONYMS, Row, first, of_family
from megazero.config.words import dashed, is_flag, says_on, values_after
from megazero.errors import DataError

COMMAND = "--dialect"
"""The flag that names the fork whose line follows."""
_SAME = "it is so without it"


@dataclass(frozen=True)
class Meant:
    """Arguments that stand for the defaults of forks, for the flags that a line leaves out."""

    forks: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()


@dataclass
class Reading:
    """A command line in the flags of this project.

    Attributes:
        argv: its arguments.
        assumed: forks whose flags are on it, though none is named.
        ignored: flags without effect.
        problems: why it cannot be read.
        replaced: the flag of a fork or another trainer, with its values -> what is read instead.
        given: every flag of the line, with dashes -> its values.
        left_out: the defaults of its forks, for the flags that it leaves out.
    """

    argv: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)
    given: dict[str, list[str]] = field(default_factory=dict)
    left_out: Meant = Meant()

    def warnings(self) -> list[str]:
        """Lines on the flags that were read as others: those of a fork, and names that any trainer uses."""
        whose = f" (`{COMMAND} {self.assumed[0]}` says so)" if self.assumed else ""
        named = {theirs: dashed(theirs.partition(" ")[0]) in SYNONYMS for theirs in self.replaced}
        lines = []
        for whoever, what in (
            (False, f"of a fork are read as what they mean here{whose}"),
            (True, "are read as what they mean here"),
        ):
            pairs = [
                f"`{theirs}` as `{ours}`"
                for theirs, ours in self.replaced.items()
                if named[theirs] is whoever
            ]
            lines += [f"flags {what}: {'; '.join(pairs)}."] if pairs else []
        return lines


def translate(argv: Sequence[str], known: Mapping[str, str]) -> Reading:
    """Rewrite a command line, of whichever fork, in the flags of this project.

    The fork is that of `--dialect`, or else the one that knows the most of the flags that are unknown here.

    Args:
        argv: the arguments.
        known: every other flag, by its name with dashes.
    """
    reading = Reading(given=_given(argv))
    named = _named(argv, reading)
    counts = Counter([named]) if named else _counts(known, reading)
    best = [fork for fork in DIALECTS if counts and counts[fork] == max(counts.values())]
    reading.assumed = [] if named else best
    # The forks to ask about a flag: first those that must all agree, then the others.
    tables = [best] if named or not best else [best, [fork for fork in DIALECTS if fork not in best]]
    _read_all(reading, tables, known, argv)
    _leave_out(reading, tables, known, [fork for fork in DIALECTS if fork in counts])
    return reading


def _read_all(
    reading: Reading, tables: list[list[str]], known: Mapping[str, str], argv: Sequence[str]
) -> None:
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


def _leave_out(
    reading: Reading, tables: list[list[str]], known: Mapping[str, str], forks: Sequence[str]
) -> None:
    """Add the defaults of the forks whose flags are on the line, for the flags that it leaves out."""
    given = reading.given
    by_fork = {
        fork: [row for row in LEFT_OUT[fork] if row.name not in given and row.when.is_beside(given)]
        for fork in forks
    }
    # A row with `beside` goes with one flag of its fork. The others are about the whole line, and must agree.
    whole = {tuple(row for row in rows if not row.when.beside) for rows in by_fork.values()}
    if len(whole) > 1:
        reading.problems.append(
            f"what is left out means different things to {' and '.join(by_fork)}; say whose line this is, "
            f"such as `{COMMAND} {forks[0]}`."
        )
        return
    meant = Reading(problems=reading.problems, given=given)
    for row in dict.fromkeys(row for rows in by_fork.values() for row in rows):
        _read_all(meant, tables, known, row.same or ())
    reading.left_out = Meant(tuple(fork for fork, rows in by_fork.items() if rows), tuple(meant.argv))


def _read(
    reading: Reading, tables: list[list[str]], known: Mapping[str, str], token: str, values: list[str]
) -> int:
    """Read one flag; returns how many of its values are read with it."""
    name = token.partition("=")[0]
    spelled = known.get(dashed(name))
    if dashed(name) == COMMAND:
        return len(values[:1])
    row = _row(dashed(name), values, tables, reading, known)
    if row is None and spelled is None and _lacks_value(dashed(name), values, tables):
        reading.problems.append(f"`{name}` must be followed by a value.")
        return 0
    if row is None:
        reading.argv.append(token if spelled is None else spelled + token[len(name) :])
        return 0
    taken = values[: row.most]
    given = " ".join([name, *taken])
    said = values[:1] if "=" in token else taken[:1]
    if row.switch and said and not says_on(said[0]):
        reading.problems.append(
            f"`{name}` is a switch that must stand alone or be true, but is `{said[0]}`; leave it out."
        )
        return len(taken)
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
        if tokens:
            reading.replaced[given] = " ".join(tokens)
        else:
            reading.ignored.append(Ignored(name, _SAME, Foreign(name, accepted=_SAME)))
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
    """Fill a placeholder with a fork's values; a result that begins with a brace lacks a flag to fill it.

    ``{}`` are the values, and ``{n}`` is the number of parts between commas of the first value.
    ``{--flag}`` is the value of another flag, and ``{/--flag}`` the first value divided by it. ``{range}``
    are the steps of 5-7 9-10, and ``{pairs}`` those of 5 7 9 10. ``{weighted}`` is a blend of parts of
    datasets. ``{layout}``, ``{ends}`` and ``{split}`` are arguments about the layers of stages, and
    ``{evals}`` are arguments about evaluations.
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
    if token == "{split}":
        return of_split(int(first), given)
    if token == "{evals}":
        return of_evaluations(int(first), given)
    if token == "{weighted}":
        return list(weighted(" , ".join(values)))
    if token in ("{range}", "{pairs}"):
        ends = [int(end) for value in values for end in value.split("-")]
        spans = zip(ends[::2], ends[1::2], strict=False)
        # The fork numbers steps from 1; here a step is named by the number of steps before it.
        return [str(number) for start, stop in spans for number in range(max(start, 1) - 1, stop)]
    if token.startswith("{/") and other:
        return [repr(float(first) / float(other[0]))]
    if token.startswith("{--") and other:
        return [other[0]]
    return [token.replace("{}", first)]


def _row(
    name: str, values: Sequence[str], tables: list[list[str]], reading: Reading, known: Mapping[str, str]
) -> Row | None:
    """Return the row of a flag; None if none fits, or if the forks in question disagree."""
    is_known, given = name in known, reading.given
    # A flag that is known here has another meaning only on a line of the fork itself.
    for names in tables[:1] if is_known else tables:
        meanings = {
            fork: row for fork in names if (row := first(DIALECTS[fork], name, values, given)) is not None
        }
        if len(set(meanings.values())) > 1:
            if is_known:
                return None
            reading.problems.append(
                f"`{name}` means different things to {' and '.join(meanings)}; say whose line this is, such "
                f"as `{COMMAND} {next(iter(meanings))}`."
            )
        if (
            meanings
            and is_known
            and reading.assumed
            and not all(row.when.values for row in meanings.values())
        ):
            fork = next(iter(meanings))
            reading.problems.append(
                f"`{name}` means another thing to {fork}, of whose flags there are others; say "
                f"`{COMMAND} {fork}` if this is its line, or leave those out."
            )
            return None
        if meanings:
            return next(iter(meanings.values()))
    row = first(SYNONYMS, name, values, given)
    if is_known:  # some of its values may have other names, but the flag itself keeps its meaning
        return row if row is not None and row.when.values else None
    return row or of_family(name, known)


def _lacks_value(name: str, values: Sequence[str], tables: list[list[str]]) -> bool:
    known = [DIALECTS[fork] for names in tables for fork in names] + [SYNONYMS]
    return any(row.when.least > len(values) for rows in known for row in rows.get(name, ()))


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


def _counts(known: Mapping[str, str], reading: Reading) -> Counter[str]:
    """Fork -> the number of flags on the line that are its own."""
    return Counter(
        fork
        for name, values in reading.given.items()
        for fork, rows in DIALECTS.items()
        if _tells(rows, name, values, reading, known)
    )


def _tells(
    rows: Mapping[str, tuple[Row, ...]],
    name: str,
    values: Sequence[str],
    reading: Reading,
    known: Mapping[str, str],
) -> bool:
    """Whether only the fork with these rows knows a flag with these values."""
    row = first(rows, name, values, reading.given)
    if row is None or first(SYNONYMS, name, values, reading.given) is not None:
        return False
    return bool(row.when.values) if name in known else of_family(name, known) is None
