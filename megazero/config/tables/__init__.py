"""tables: facts about other trainers as data, and how they are read.

`accepted.txt`, `dependent.txt`, `refused.txt`, `absent.txt` and `conditional.csv` say what becomes of their
flags; `dialects/` says so of the flags of forks, and `families.txt` of any whose name tells that it changes
no number. `defaults.csv` is about the defaults that are not simply those of both Megatrons: where both give a
setting the same default, it is the default here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path(__file__).parent


def blocks(name: str) -> Iterator[tuple[str, list[str]]]:
    """The blocks of a text: a line, and the words of the indented lines below it. A # begins a comment."""
    head, words = "", list[str]()
    for line in _FOLDER.joinpath(name).read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            words += line.split()
        elif line and not line.startswith("#"):
            if head:
                yield head, words
            head, words = line, []
    yield head, words


def names_in(folder: str) -> list[str]:
    """The names of the texts in a folder, without their endings, in order."""
    return sorted(path.stem for path in _FOLDER.joinpath(folder).glob("*.txt"))


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file with a line of heads."""
    with _FOLDER.joinpath(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
