"""Columns of numbers from a file of JSON lines, read once and then only where it grew."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megazero.data.native import NATIVE
from megazero.errors import DataError
from megazero.regular_file import open_regular, why_unreadable

Columns = dict[str, "np.ndarray[Any, np.dtype[np.float64]]"]
Read = tuple[Columns, list[int], int]
"""Columns, numbers of the lines that are no JSON objects, and the number of all lines."""
CHUNK = 2**23
"""About how many bytes are read at a time."""
_ELEMENTS = 4  # of an array within an object
_WORDS = MappingProxyType({"Infinity": np.inf, "-Infinity": -np.inf})
_SHOWN = 20  # damaged lines that are named


def columns_reference(text: bytes, base: int) -> Read:
    """Read the columns of whole lines.

    A name within an object is joined by a dot, and what a line lacks is NaN. An array directly in a line's
    object is not read: its column, named ``@`` and the key, has the place of the line.
    """
    rows: list[dict[str, float]] = []
    refused = []
    lines = text.removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines):
        try:
            rows.append(dict(_flat(json.loads(line), base)))
        except (ValueError, RecursionError, AttributeError):
            refused.append(number)
        base += len(line) + 1
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}, refused, len(lines)


def _flat(record: Mapping[str, object], base: int, above: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        name = f"{above}.{key}" if above else key
        if isinstance(value, str):
            value = _WORDS.get(value)
        if isinstance(value, dict):
            yield from _flat(value, base, name)
        elif isinstance(value, list) and not above:
            yield f"@{name}", float(base)
        elif isinstance(value, list):
            yield from _flat({str(i): item for i, item in enumerate(value[:_ELEMENTS])}, base, name)
        elif value is not None:
            yield name, float(value)  # type: ignore[arg-type]


def compiled() -> Callable[[bytes, int], Read] | None:
    """The compiled twin of `columns_reference`, which is some 30 times as fast; None if it is not built."""
    read = getattr(NATIVE, "json_columns", None)
    return None if read is None else lambda text, base: read(np.frombuffer(text, np.uint8), base)


@dataclass
class Lines:
    """The lines of a file of metrics so far.

    Attributes:
        path: the file.
        columns: name -> its value in each line that has an iteration; NaN where it has none.
        refused: what is wrong with each line that is left out, one clause for each.
    """

    path: Path
    columns: Columns = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    _identity: tuple[int, int] = (0, 0)
    _read: int = 0
    _lines: int = 0
    _unended: bool = False

    @property
    def damage(self) -> list[str]:
        """The faults of the file in sentences: one for each damaged line, or for the first of many."""
        sentences = [f"{clause}; it is left out" for clause in self.refused[:_SHOWN]]
        if len(self.refused) > _SHOWN:
            sentences.append(f"{self.path} has {len(self.refused)} damaged lines in all")
        if self._unended:
            why = "it is being written, or a crash cut it short"
            sentences.append(f"{self.path}, line {self._lines + 1} has no end: {why}")
        return sentences

    def update(self) -> bool:
        """Read what was added since, or all of a file that was written anew; returns whether anything is new.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            with open_regular(self.path) as file:
                stat = os.fstat(file.fileno())
                identity = (stat.st_dev, stat.st_ino)
                if identity != self._identity or stat.st_size < self._read:
                    vars(self).update(vars(Lines(self.path, _identity=identity)))
                ends = _ends(file, self._read, stat.st_size)
                with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                    spans = zip([self._read, *ends], ends, strict=False)
                    self._add(list(pool.map(partial(_parsed, file.fileno()), spans)))
                self._unended = bool(os.pread(file.fileno(), 1, self._read))
        except OSError as error:
            raise DataError(
                f"`RUN` must be a run's folder or a file of metrics, but {self.path}: "
                f"{why_unreadable(error)}; check the path"
            ) from error
        return bool(ends)

    def rows_with(self, array: str) -> list[int]:
        """The rows in whose lines a key has an array."""
        rows: list[int] = np.flatnonzero(np.isfinite(self.columns.get(f"@{array}", np.zeros(0)))).tolist()
        return rows

    def array(self, name: str, row: int) -> list[Any]:
        """The array that a row of `rows_with` has; empty if its line has been damaged since."""
        with open_regular(self.path) as file:
            file.seek(int(self.columns[f"@{name}"][row]))
            try:
                array: list[Any] = json.loads(file.readline())[name]
            except (ValueError, TypeError, KeyError):
                return []
        return array

    def _add(self, pieces: Sequence[_Piece]) -> None:
        for piece in pieces:
            self.refused += [f"{self.path}, line {self._lines + i + 1} {why}" for i, why in piece.refused]
            self._read += piece.size
            self._lines += piece.lines
        parts = [self.columns, *(piece.columns for piece in pieces)]
        lacking = [np.full(len(next(iter(part.values()), ())), np.nan) for part in parts]
        names = dict.fromkeys(name for part in parts for name in part)
        self.columns = _in_order(
            {
                name: np.concatenate(
                    [part.get(name, none) for part, none in zip(parts, lacking, strict=True)]
                )
                for name in names
            }
        )


class _Piece(NamedTuple):
    """Columns of whole lines, and (line from 0, reason) of those that are left out."""

    size: int
    lines: int
    columns: Columns
    refused: list[tuple[int, str]]


def _ends(file: BinaryIO, at: int, size: int) -> list[int]:
    """The places in a file, after one, at which pieces of whole lines end."""
    while size > at and os.pread(file.fileno(), 1, size - 1) != b"\n":  # a last line without an end
        size -= 1
    ends = []
    while at < size:
        file.seek(min(at + CHUNK, size) - 1)
        file.readline()
        ends.append(at := file.tell())
    return ends


def _parsed(descriptor: int, span: tuple[int, int]) -> _Piece:
    text = os.pread(descriptor, span[1] - span[0], span[0])
    columns, refused, count = (compiled() or columns_reference)(text, span[0])
    lines = text.split(b"\n") if refused else []
    reasons = {number: _why(lines[number]) for number in refused}
    numbers = np.delete(np.arange(count), refused)
    sound = np.isfinite(columns.get("iteration", np.full(len(numbers), np.nan)))
    reasons |= dict.fromkeys(numbers[~sound].tolist(), "has no `iteration`")
    columns = {name: column[sound] for name, column in columns.items()}
    return _Piece(len(text), count, columns, sorted(reasons.items()))


def _why(line: bytes) -> str:
    try:
        return "is not understood" if isinstance(json.loads(line), dict) else "is not an object"
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"


def _in_order(columns: Columns) -> Columns:
    """The columns with each iteration once, its last line, in ascending order."""
    iterations = columns.get("iteration")
    if iterations is None or bool(np.all(np.diff(iterations) > 0)):
        return columns
    _, last = np.unique(iterations[::-1], return_index=True)
    return {name: column[::-1][last] for name, column in columns.items()}
