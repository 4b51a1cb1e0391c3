"""Take texts out of the rows of a chunk, lines of JSON or rows of a table, and name every bad row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from megazero.errors import DataError

# Integers as floats may have any number of digits; their values are not used.
_STRICT = json.JSONDecoder(parse_int=float)
# JSON texts with half of a surrogate pair, in each position.
_HALVES = (rb'"\ud800"', rb'"\udc00"', rb'"\ud800a"', rb'"\ud800\u0041"', rb'"\udc00\ud800"')
Split = Callable[[str], list[str]]  # text -> its sentences


class BadRow(NamedTuple):
    """Why a row cannot be used: the class of problem, and the details."""

    reason: str
    detail: str


@dataclass(frozen=True)
class Problem:
    """A bad line: its number from 0 in its chunk, the class of problem, and the details."""

    line: int
    reason: str
    detail: str

    @classmethod
    def of_length(cls, item: str, limit: int | None) -> Problem:
        """The problem of a line or row that is too long."""
        return cls(0, "too long", f"the {item} has more than {limit} bytes")


@dataclass
class Column:
    """The documents of one JSON key: all `texts`, and the number of texts per document (None: one)."""

    texts: list[str]
    counts: list[int] | None = None

    @classmethod
    def of(cls, documents: Sequence[Sequence[str]]) -> Column:
        """Make the column of documents, each a sequence of texts."""
        return cls([text for texts in documents for text in texts], [len(texts) for texts in documents])


@dataclass
class Parsed:
    """A chunk's good documents, a column per key, and its bad lines; `lines` counts blank lines too."""

    lines: int
    columns: list[Column]
    problems: list[Problem] = field(default_factory=list)


class Rows(Protocol):
    """The rows of a chunk.

    Attributes:
        item: the name of a row.
    """

    item: str

    def __len__(self) -> int: ...

    def size(self, number: int) -> int:
        """The bytes of a row."""

    def first(self, count: int) -> Rows:
        """The first rows."""

    def columns(self, keys: Sequence[str]) -> list[list[str]] | None:
        """The texts of each key, if each row has a plain string for every key; else None."""

    def row(self, number: int) -> dict[str, Any] | BadRow | None:
        """A row by itself; None if it is blank."""


@dataclass(frozen=True)
class LineRows(Rows):
    """Lines of JSON, without newlines; the size counts these.

    JSON is what Python's `json` accepts: the last of two equal keys counts, and NaN is a number. But UTF-8
    must be strict, and a text must not have half of a surrogate pair.
    """

    lines: Sequence[bytes]
    item: str = "line"

    def __len__(self) -> int:
        return len(self.lines)

    def size(self, number: int) -> int:
        return len(self.lines[number]) + 1

    def first(self, count: int) -> LineRows:
        return LineRows(self.lines[:count])

    def columns(self, keys: Sequence[str]) -> list[list[str]] | None:
        loads = fast_loads()
        try:
            rows = [loads(line) for line in self.lines]
        except (ValueError, RecursionError):
            return None  # parse_carefully finds the line and the reason
        columns = strings_of(rows, keys)
        # The search for halves takes a tenth of a chunk's time, and is skipped if the parser refuses them.
        for texts in [] if columns is None or _refuses_halves(loads) else columns:
            for line, text in zip(self.lines, texts, strict=True):
                # Half of a surrogate pair can only come from an escape; isascii() costs nothing.
                if not text.isascii() and (b"\\ud" in line or b"\\uD" in line) and not _is_unicode(text):
                    return None
        return columns

    def row(self, number: int) -> dict[str, Any] | BadRow | None:
        line = self.lines[number]
        if not line.strip():
            return None
        try:
            row = _STRICT.decode(str(line, "utf-8"))
        except UnicodeDecodeError as error:
            byte = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
            return BadRow("not UTF-8", f"{byte} is not UTF-8")
        except RecursionError:
            return BadRow("malformed JSON", "it is nested too deeply")
        except ValueError as error:
            return BadRow("malformed JSON", str(error))
        if not isinstance(row, dict):
            return BadRow("not an object", f"the line must be a JSON object, but is {_kind(row)}")
        return row


def value_of(row: Mapping[str, Any], key: str) -> Any:
    """The value of a key, or else of the path that its dots spell. KeyError or TypeError if it is missing."""
    if "." not in key or key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value[part]
    return value


def strings_of(rows: Sequence[Any], keys: Sequence[str]) -> list[list[str]] | None:
    """The values of each key, if every row is an object in which they are strings; else None."""
    try:
        columns = [
            [value_of(row, key) for row in rows] if "." in key else [row[key] for row in rows] for key in keys
        ]
    except (KeyError, TypeError, IndexError):
        return None
    types = set(map(type, rows)) <= {dict}
    return columns if types and all(set(map(type, texts)) <= {str} for texts in columns) else None


def fast_loads() -> Callable[[bytes], Any]:
    """A JSON parser for good lines: orjson's if installed, else Python's.

    All that it accepts, `_STRICT` accepts with the same strings. What it refuses is parsed again by
    `_STRICT`, which decides.
    """
    try:
        import orjson
    except ImportError:
        return lambda line: _STRICT.decode(str(line, "utf-8"))
    loads: Callable[[bytes], Any] = orjson.loads
    return loads


def _refuses_halves(loads: Callable[[bytes], Any]) -> bool:
    """Whether a parser refuses half of a surrogate pair, as orjson 3.13 does and `json` does not."""
    for half in _HALVES:
        try:
            loads(half)
        except ValueError:
            continue
        return False
    return True


def parse(rows: Rows, keys: Sequence[str], split: Split | None = None) -> Parsed:
    """Parse the documents of rows.

    `split` divides each text into several, but not the texts of a list; its errors are raised.
    """
    columns = rows.columns(keys)
    if columns is None:
        return parse_carefully(rows, keys, split=split)
    if split is None:
        return Parsed(len(rows), [Column(texts) for texts in columns])
    return Parsed(len(rows), [Column.of(list(map(split, texts))) for texts in columns])


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def parse_carefully(
    rows: Rows,
    keys: Sequence[str],
    accept: Callable[[str], object] | None = None,
    split: Split | None = None,
) -> Parsed:
    """Parse row by row. A row that is bad for one key is left out for all, so that columns stay aligned.

    `accept`, and `split` as in `parse`, may raise DataError to refuse a text.
    """
    columns: list[list[list[str]]] = [[] for _ in keys]
    problems: list[Problem] = []
    for number in range(len(rows)):
        row = rows.row(number)
        if row is None:
            continue
        documents = row if isinstance(row, BadRow) else _documents(row, keys, accept, split)
        if isinstance(documents, BadRow):
            problems.append(Problem(number, *documents))
            continue
        for column, texts in zip(columns, documents, strict=True):
            column.append(texts)
    return Parsed(len(rows), [Column.of(documents) for documents in columns], problems)


def _documents(
    row: dict[str, Any],
    keys: Sequence[str],
    accept: Callable[[str], object] | None,
    split: Split | None,
) -> list[list[str]] | BadRow:
    """Return a list of texts per key, or the problem."""
    columns = []
    for key in keys:
        try:
            value = value_of(row, key)
        except (KeyError, TypeError):
            have = ", ".join(list(row)[:5]) or "none"
            return BadRow("missing key", f"key `{key}` is missing (keys: {have})")
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            must = f"key `{key}` must be a string or a list of strings"
            return BadRow("wrong type", f"{must}, but is {_kind(value)}")
        try:
            for text in texts:
                text.encode("utf-8")
            if split is not None and isinstance(value, str):
                texts = split(value)
            if accept is not None:
                for text in texts:
                    accept(text)
        except UnicodeEncodeError as error:
            half = f"{text[error.start]!a}, half of a surrogate pair"
            return BadRow("lone surrogate", f"key `{key}` holds {half}")
        except DataError as error:
            return BadRow("not tokenizable", f"key `{key}`: {error}")
        columns.append(texts)
    return columns


def _kind(value: object) -> str:
    odd = [item for item in value if not isinstance(item, str)] if isinstance(value, list) else []
    if odd:
        return f"a list with {_kind(odd[0])}"
    names = {float: "a number", bool: "a boolean", dict: "an object", str: "a string", type(None): "null"}
    return names.get(type(value), "a list")
