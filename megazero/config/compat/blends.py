"""Blends of datasets in a file, and parts of datasets, in the forms of Megatron-LM and its forks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megazero.config.words import is_number
from megazero.errors import DataError
from megazero.regular_file import read_regular_text, why_unreadable
from megazero.storage.cached import Cache

MARK = "@"
"""The first character of a data path that names a file with a blend."""

_PART = re.compile(r"(?P<prefix>.+)\[(?P<start>[\d.]+):(?P<stop>[\d.]+)\]")


def expanded(entries: Sequence[str], split: str) -> tuple[str, ...]:
    """Return `--data-path` or a sibling flag as prefixes and weights.

    Args:
        entries: as given, or ``@FILE``: words as on a command line, lines of weight, prefix and corpus, a
            JSON with a list for each split, or BigScience's groups ``NAME: WEIGHT START:STOP PREFIX, ...``.
        split: train, valid or test, whose blend is asked for.

    Raises:
        DataError: the file is not there, is empty, or of no such form.
    """
    if len(entries) != 1 or not entries[0].startswith(MARK):
        return tuple(entries)
    path = Path(Cache().file(entries[0].removeprefix(MARK)))
    try:
        text = read_regular_text(path)
    except (OSError, UnicodeDecodeError) as error:
        why = why_unreadable(error) if isinstance(error, OSError) else error
        raise DataError(f"a file with a blend must be readable text, but {path} is not: {why}.") from error
    return blend_in(text, split, path)


def blend_in(text: str, split: str, path: Path) -> tuple[str, ...]:
    """Return the blend of a split in the text of a file, as `expanded` does, with the same errors."""
    if not text.strip():
        raise DataError(f"a file with a blend must name datasets, but {path} is empty; write one into it.")
    if text.lstrip().startswith("{"):
        return _of_json(text, split, path)
    if re.search(r"[\d.]+:[\d.]+\s", text):
        return tuple(weighted(text))
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if all(list(map(is_number, line)) == [True, False, False] for line in lines):
        return tuple(word for line in lines for word in line[:2])
    return tuple(word for line in lines for word in line)


def _of_json(text: str, split: str, path: Path) -> tuple[str, ...]:
    try:
        blend = json.loads(text)[split]
    except ValueError as error:
        raise DataError(f"a file with a blend must be valid JSON, but {path} is not: {error}.") from error
    except KeyError:
        raise DataError(f"{path} must have a blend for {split}, but has no such key; add it.") from None
    words = blend if isinstance(blend, list) else str(blend).split()
    return tuple(str(word) for word in words)


def weighted(text: str) -> Iterator[str]:
    """Yield the weights and prefixes of groups ``NAME: WEIGHT START:STOP PREFIX, ...``, parts included.

    Several groups, which BigScience evaluates apart, are one blend. Raises DataError for another form.
    """
    for entry in re.split(r"[,\n]", re.sub(r"\b[\w.-]+:(?=\s)", ",", re.sub(r"[\"']", " ", text))):
        words = entry.split()
        if not words:
            continue
        if len(words) != 3 or ":" not in words[1]:
            raise DataError(
                "a dataset of a weighted blend must be WEIGHT START:STOP PREFIX, but is "
                f"`{' '.join(words)[:80]}`; correct it."
            )
        yield words[0]
        is_whole = re.fullmatch(r"0(\.0*)?:1(\.0*)?", words[1]) is not None
        yield words[2] if is_whole else f"{words[2]}[{words[1]}]"


def prefix_of(name: str) -> str:
    """The prefix of ``PREFIX[0.1:0.5]``, or of a name without a part."""
    match = _PART.fullmatch(name)
    return name if match is None else match["prefix"]


def part_of(name: str, count: int) -> range:
    """The part of a dataset's `count` sequences that ``PREFIX[0.1:0.5]`` names; all without a part.

    Raises DataError for one that does not begin before it ends, within 0 and 1.
    """
    match = _PART.fullmatch(name)
    try:
        start, stop = (0.0, 1.0) if match is None else (float(match["start"]), float(match["stop"]))
    except ValueError:
        start, stop = 1.0, 0.0
    if not 0 <= start < stop <= 1:
        raise DataError(
            f"a part of a dataset must be two shares such as [0.1:0.5], the lower first, but is `{name}`; "
            "correct it."
        )
    return range(round(start * count), round(stop * count))
