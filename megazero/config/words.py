"""Words of a command line: which of them are flags, and which known word a misspelled one stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

MOST_LISTED = 20
"""The most complaints of one kind that are reported one by one; the others are counted."""


@dataclass
class Few:
    """Complaints of one kind, of which the first are reported one by one.

    Attributes:
        what: their subject, in the plural.
        count: the number of complaints so far.
    """

    what: str
    count: int = 0

    def add(self, problems: list[str], sentence: Callable[[], str]) -> None:
        """Count one more, and add its sentence to `problems` if it is one of the first."""
        self.count += 1
        if self.count <= MOST_LISTED:
            problems.append(sentence())

    def rest(self) -> list[str]:
        """One line that counts the unreported complaints; empty if there are none."""
        others = self.count - MOST_LISTED
        return [f"there are {others:,} more {self.what}."] if others > 0 else []


def split_training_flags(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split a command's own words from the training's flags after ``--``; None without a ``--``."""
    own = list(argv)
    if "--" not in own:
        return own, None
    cut = own.index("--")
    return own[:cut], own[cut + 1 :]


def is_number(text: str) -> bool:
    """Whether a text is a number, as `float` reads it."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` may stand for, ignoring case and `_` versus `-`; None if there is none.

    It is the shortest word that starts with `word`, or else the one that is the fewest edits away, if that
    is no more than one edit for every four letters.
    """
    given = _plain(word)
    words = list(known)
    longer = sorted(
        (len(other), other) for other in words if len(given) > 3 and _plain(other).startswith(given)
    )
    if longer:
        return longer[0][1]
    near = sorted(
        (distance, other) for other in words if (distance := _edits(given, _plain(other))) is not None
    )
    return near[0][1] if near else None


def _plain(word: str) -> str:
    return word.lower().replace("_", "-").lstrip("-")


def dashed(flag: str) -> str:
    """Return a flag with `-` for each `_`."""
    return flag.replace("_", "-")


def is_flag(token: str) -> bool:
    """Whether an argument is a flag, and not a value, which may be a negative number."""
    return token.startswith("-") and len(token) > 1 and not re.match(r"-\.?\d", token)


def says_on(text: str) -> bool:
    """Whether a value of a switch turns it on."""
    return text.lower() in ("true", "1", "yes", "on")


def values_after(argv: Sequence[str], position: int) -> list[str]:
    """The arguments from `position` to the next flag."""
    return list(takewhile(lambda token: not is_flag(token), argv[position:]))


def _edits(word: str, other: str) -> int | None:
    """The number of letters to change, add, drop or swap; None if there are too many."""
    most = max(1, len(word) // 4)
    if abs(len(word) - len(other)) > most:
        return None
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(word):
        earlier, before, row = before, row, [i + 1]
        for j, theirs in enumerate(other):
            cheapest = min(before[j] + (letter != theirs), before[j + 1] + 1, row[j] + 1)
            if i and j and letter == other[j - 1] and word[i - 1] == theirs:
                cheapest = min(cheapest, earlier[j - 1] + 1)
            row.append(cheapest)
        if min(*row, *before) > most:
            return None
    return row[-1] if row[-1] <= most else None
