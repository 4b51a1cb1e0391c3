"""Parse lines of jsonl, naming every bad line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megazero.data_tools.preprocessing.chunks import JsonlChunk
from megazero.errors import DataError

# Integers as floats may have any number of digits; their values are not used.
_STRICT = json.JSONDecoder(parse_int=float)
# JSON texts with half of a surrogate pair, in each position.
_HALVES = (rb'"\ud800"', rb'"\udc00"', rb'"\ud800a"', rb'"\ud800\u0041"', rb'"\udc00\ud800"')
Split = Callable[[str], list[str]]  # text -> its sentences
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Problem:
    """A bad line: its number from 0 in its chunk, the class of problem, and the details."""

    line: int
    reason: str
    detail: str

    @classmethod
    def of_length(cls, chunk: JsonlChunk) -> Problem:
        """The problem of a line that is too long."""
        return cls(0, "too long", f"the line has more than {chunk.beyond} bytes")


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


def split_lines(chunk: JsonlChunk, data: bytes) -> list[bytes]:
    """Split a chunk into lines without newlines, and drop a byte order mark at the start of a file."""
    if chunk.start == 0 and data.startswith(_BOM):
        data = data[len(_BOM) :]
    lines = data.split(b"\n")
    return lines[:-1] if not lines[-1] else lines


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


def parse(lines: Sequence[bytes], keys: Sequence[str], split: Split | None = None) -> Parsed:
    """Parse the documents of lines.

    JSON is what Python's `json` accepts: the last of two equal keys counts, and NaN is a number. But UTF-8
    must be strict, and a text must not have half of a surrogate pair. `split` divides each text into several,
    but not the texts of a list; its errors are raised.
    """
    columns = _parse_all_good(lines, keys)
    if columns is None:
        return parse_carefully(lines, keys, split=split)
    if split is None:
        return Parsed(len(lines), [Column(texts) for texts in columns])
    return Parsed(len(lines), [Column.of(list(map(split, texts))) for texts in columns])


def _parse_all_good(lines: Sequence[bytes], keys: Sequence[str]) -> list[list[str]] | None:
    """Parse all lines if each is an object with a plain string for every key; else return None."""
    loads = fast_loads()
    try:
        rows = [loads(line) for line in lines]
        columns = [[row[key] for row in rows] for key in keys]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None  # parse_carefully finds the line and the reason
    if not {type(row) for row in rows} <= {dict}:
        return None
    for texts in columns:
        if not set(map(type, texts)) <= {str}:
            return None
    # The search for halves takes a tenth of a chunk's time, and is skipped if the parser refuses them.
    for texts in [] if _refuses_halves(loads) else columns:
        for line, text in zip(lines, texts, strict=True):
            # Half of a surrogate pair can only come from an escape; isascii() costs nothing.
            if not text.isascii() and (b"\\ud" in line or b"\\uD" in line) and not _is_unicode(text):
                return None
    return columns


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def parse_carefully(
    lines: Sequence[bytes],
    keys: Sequence[str],
    accept: Callable[[str], object] | None = None,
    split: Split | None = None,
) -> Parsed:
    """Parse line by line. A line that is bad for one key is left out for all, so that columns stay aligned.

    `accept`, and `split` as in `parse`, may raise DataError to refuse a text.
    """
    columns: list[list[list[str]]] = [[] for _ in keys]
    problems: list[Problem] = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        row = _parse_line(line, keys, accept, split)
        if isinstance(row, tuple):
            problems.append(Problem(number, *row))
            continue
        for column, texts in zip(columns, row, strict=True):
            column.append(texts)
    return Parsed(len(lines), [Column.of(documents) for documents in columns], problems)


def _parse_line(
    line: bytes, keys: Sequence[str], accept: Callable[[str], object] | None, split: Split | None
) -> list[list[str]] | tuple[str, str]:
    """Parse one line; returns a list of texts per key, or the reason and detail of its problem."""
    try:
        row = _STRICT.decode(str(line, "utf-8"))
    except UnicodeDecodeError as error:
        return "not UTF-8", f"byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8"
    except RecursionError:
        return "malformed JSON", "it is nested too deeply"
    except ValueError as error:
        return "malformed JSON", str(error)
    if not isinstance(row, dict):
        return "not an object", f"the line must be a JSON object, but is {_kind(row)}"
    columns = []
    for key in keys:
        if key not in row:
            have = ", ".join(list(row)[:5]) or "none"
            return "missing key", f"key `{key}` is missing (keys: {have})"
        texts = [row[key]] if isinstance(row[key], str) else row[key]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return (
                "wrong type",
                f"key `{key}` must be a string or a list of strings, but is {_kind(row[key])}",
            )
        try:
            for text in texts:
                text.encode("utf-8")
            if split is not None and isinstance(row[key], str):
                texts = split(row[key])
            if accept is not None:
                for text in texts:
                    accept(text)
        except UnicodeEncodeError as error:
            return "lone surrogate", f"key `{key}` holds {text[error.start]!a}, half of a surrogate pair"
        except DataError as error:
            return "not tokenizable", f"key `{key}`: {error}"
        columns.append(texts)
    return columns


def _kind(value: object) -> str:
    odd = [item for item in value if not isinstance(item, str)] if isinstance(value, list) else []
    if odd:
        return f"a list with {_kind(odd[0])}"
    names = {float: "a number", bool: "a boolean", dict: "an object", str: "a string", type(None): "null"}
    return names.get(type(value), "a list")
