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
    given, words = _plain(word), [(_plain(other), other) for other in known]
    longer = [(len(other), other) for plain, other in words if len(given) > 3 and plain.startswith(given)]
    if longer:
        return min(longer)[1]
    near = [(edits, other) for plain, other in words if (edits := _edits(given, plain)) is not None]
    return min(near)[1] if near else None


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
    """The number of letters to change, add, drop or swap; None if there are too many.

    A column of the table of distances is two integers, of which each bit says whether the distance grows
    (`more`) or shrinks (`less`) at that letter of `word` (Hyyrö, "A bit-vector algorithm for computing
    Levenshtein and Damerau edit distances", 2003).
    """
    most = max(1, len(word) // 4)
    if abs(len(word) - len(other)) > most:
        return None
    places: dict[str, int] = {}
    for i, letter in enumerate(word):
        places[letter] = places.get(letter, 0) | 1 << i
    every = (1 << len(word)) - 1
    last = every & ~(every >> 1)
    distance, more, less, free, before = len(word), every, 0, 0, 0
    for letter in other:
        same = places.get(letter, 0)
        swapped = (~free & same) << 1 & before
        free = (((same & more) + more) ^ more) | same | less | swapped
        up, down = less | ~(free | more), free & more
        distance += bool(up & last) - bool(down & last)
        up, down = up << 1 | 1, down << 1
        more, less, before = (down | ~(free | up)) & every, up & free & every, same
    return distance if distance <= most else None
