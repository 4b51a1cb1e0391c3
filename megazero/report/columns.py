"""Columns of numbers from a file of JSON lines, read once and then only where it grew."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
LEFT_OUT = "; it is left out"
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
            record = _loads(line)
            rows.append(dict(_flat(record, base)))
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


def _loads(line: bytes) -> Any:
    try:
        import orjson
    except ImportError:
        return json.loads(line)
    return orjson.loads(line)


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
        damage: what is wrong with the file, one sentence for each damaged line.
    """

    path: Path
    columns: Columns = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    _identity: tuple[int, int] = (0, 0)
    _read: int = 0
    _lines: int = 0
    _damaged: int = 0

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
                    self.columns, self.damage, self._identity = {}, [], identity
                    self._read = self._lines = self._damaged = 0
                before, ends = self._read, _ends(file.fileno(), self._read, stat.st_size)
                with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                    spans = zip([before, *ends], ends, strict=False)
                    self._add(list(pool.map(partial(_parsed, file.fileno()), spans)))
                rest = os.pread(file.fileno(), 200, self._read)
        except OSError as error:
            raise DataError(
                f"`RUN` must be a run's folder or a file of metrics, but {self.path}: "
                f"{why_unreadable(error)}; check the path"
            ) from error
        cut = f"{self.path}, line {self._lines + 1} has no end: it is being written, or a crash cut it short"
        self.damage = [line for line in self.damage if " has no end: " not in line] + [cut] * bool(rest)
        return before != self._read

    def record(self, place: float) -> dict[str, Any]:
        """The object of the line at a place, as a column named ``@...`` has it; empty if it is damaged."""
        with open_regular(self.path) as file:
            file.seek(int(place))
            try:
                value = json.loads(file.readline())
            except ValueError:
                return {}
        return value if isinstance(value, dict) else {}

    def _add(self, chunks: list[_Piece]) -> None:
        for chunk in chunks:
            self._read += chunk.size
            for number, why in chunk.damage:
                self._damaged += 1
                if self._damaged <= _SHOWN:
                    self.damage.append(f"{self.path}, line {self._lines + number + 1} {why}{LEFT_OUT}")
            self._lines += chunk.lines
        if self._damaged > _SHOWN:
            self.damage[_SHOWN:] = [f"{self.path} has {self._damaged} damaged lines in all"]
        parts = [self.columns, *(chunk.columns for chunk in chunks)]
        sizes = [next((len(column) for column in part.values()), 0) for part in parts]
        names = dict.fromkeys(name for part in parts for name in part)
        joined = {
            name: np.concatenate(
                [part.get(name, np.full(size, np.nan)) for part, size in zip(parts, sizes, strict=True)]
            )
            for name in names
        }
        self.columns = _in_order(joined)


@dataclass(frozen=True)
class _Piece:
    """Columns of whole lines, and (line from 0, reason) of those that are left out."""

    size: int
    lines: int
    columns: Columns
    damage: list[tuple[int, str]]


def _ends(descriptor: int, at: int, size: int) -> list[int]:
    """The places in a file, after one, at which pieces of whole lines end."""
    while size > at and os.pread(descriptor, 1, size - 1) != b"\n":  # a last line without an end
        size -= 1
    ends = []
    while at < size:
        at = min(at + CHUNK, size)
        while at < size and (newline := os.pread(descriptor, 2**16, at - 1).find(b"\n")) != 0:
            at = at + newline if newline > 0 else at + 2**16 - 1
        ends.append(min(at, size))
    return ends


def _parsed(descriptor: int, span: tuple[int, int]) -> _Piece:
    text = os.pread(descriptor, span[1] - span[0], span[0])
    columns, refused, count = (compiled() or columns_reference)(text, span[0])
    damage = []
    if refused:
        lines = text.split(b"\n")
        damage = [(number, _why(lines[number])) for number in refused]
    iterations = columns.get("iteration", np.full(count - len(refused), np.nan))
    lacking = np.flatnonzero(~np.isfinite(iterations))
    if lacking.size:
        numbers = np.setdiff1d(np.arange(count), np.array(refused, dtype=int))
        damage = sorted([*damage, *((int(numbers[i]), "has no `iteration`") for i in lacking)])
        columns = {name: np.delete(column, lacking) for name, column in columns.items()}
    return _Piece(len(text), count, columns, damage)


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
    kept = len(iterations) - 1 - last
    return {name: column[kept] for name, column in columns.items()}
