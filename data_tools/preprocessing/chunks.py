"""Splits jsonl files at newlines and parses the pieces, naming every bad line."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import IO, Any

from megazero.errors import DataError

# Small enough that a chunk, its lines, texts and tokens stay in the processor's cache, and that their memory
# is used again for the next chunk: chunks of 8 MiB were each mapped anew, page by page.
CHUNK_BYTES = 2 << 20
LONGEST_LINE = 256 << 20
"""Bytes that a line has at most, unless another number is given: a few kilobytes of gzip can unpack to one
line that fills any memory."""
_STEP = 1 << 20
# Integers are not our concern: as floats they may have any number of digits.
_STRICT = json.JSONDecoder(parse_int=float)
# Halves of a surrogate pair at each place where one can stand.
_HALVES = (rb'"\ud800"', rb'"\udc00"', rb'"\ud800a"', rb'"\ud800\u0041"', rb'"\udc00\ud800"')
# Makes one text several.
Split = Callable[[str], list[str]]
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Chunk:
    """Whole lines of one file: bytes `start`..`end`, or `data` itself if the file is compressed. If the line
    there is too long to be read, `beyond` is the number of bytes that it exceeds."""

    number: int
    path: str
    start: int
    end: int
    data: bytes | None = None
    beyond: int | None = None

    def read(self) -> bytes:
        """The chunk's bytes. DataError if the file has become shorter."""
        if self.data is not None:
            return self.data
        with open(self.path, "rb") as file:
            file.seek(self.start)
            data = file.read(self.end - self.start)
        if len(data) != self.end - self.start:
            raise DataError(f"`{self.path}` must not change while it is read, but became shorter; run again.")
        return data

    def __str__(self) -> str:
        kind = "" if self.data is None else " when unpacked"
        return f"bytes {self.start}..{self.end} of {self.path}{kind}"


@dataclass(frozen=True)
class Segment:
    """Whole lines of one file, from byte `start` to `end` (None: to its end). Of a compressed file, all."""

    path: str
    start: int = 0
    end: int | None = None


def cut(
    sources: Sequence[str | Segment],
    chunk_bytes: int = CHUNK_BYTES,
    longest: int = LONGEST_LINE,
    *,
    goes_on: bool = False,
) -> Iterator[Chunk]:
    """The chunks of these files or stretches in order. Where one ends depends on the arguments alone.

    A chunk is `chunk_bytes` long, plus whatever completes its last line. Compressed files (gzip, recognized
    by their first bytes) are unpacked here; others are read by whoever processes the chunk. A line of more
    than `longest` bytes, without its newline, is a chunk of its own and never in memory as a whole; it is the
    last one unless this `goes_on`.
    """
    # So that a line within a chunk is never too long; only one that completes it may be.
    step, number = min(chunk_bytes, longest), 0
    for source in sources:
        stretch = Segment(source) if isinstance(source, str) else source
        divided = _cut_gzip if is_gzip(stretch.path) else _cut_plain
        for start, end, data, fits in divided(stretch, step, longest, goes_on):
            yield Chunk(number, stretch.path, start, end, data, None if fits else longest)
            if not fits and not goes_on:
                return
            number += 1


def is_gzip(path: str) -> bool:
    """Whether the file is compressed, by its first bytes."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


# Start, end, the bytes if the file is compressed, and whether they may be read.
_Piece = tuple[int, int, bytes | None, bool]


def _cut_plain(stretch: Segment, step: int, longest: int, goes_on: bool) -> Iterator[_Piece]:
    with open(stretch.path, "rb") as file:
        start = stretch.start
        last = os.fstat(file.fileno()).st_size if stretch.end is None else stretch.end
        while start < last:
            # One byte back, so that a newline exactly at the boundary ends the chunk there.
            file.seek(start + step - 1)
            rest = skip_line(file, longest + 1)
            if step + rest > longest:
                begin = start + _last_line(file, start, step - 1)
                file.seek(begin)
                if skip_line(file, longest + 1) > longest:
                    if begin > start:
                        yield start, begin, None, True
                    if goes_on:
                        skip_line(file)
                    yield begin, file.tell(), None, False
                    start = file.tell()
                    continue
            end = min(file.tell(), last)
            yield start, end, None, True
            start = end


def skip_line(file: IO[bytes], most: int | None = None) -> int:
    """Go to the start of the next line, or as soon as more than `most` bytes are read, there; returns how
    many bytes the line had left, without its newline. Keeps no more than a megabyte at once."""
    count = 0
    while (most is None or count < most) and (
        piece := file.readline(_STEP if most is None else min(_STEP, most - count))
    ):
        count += len(piece)
        if piece.endswith(b"\n"):
            return count - 1
    return count


def _last_line(file: IO[bytes], start: int, size: int) -> int:
    """The beginning of the last line that begins in these bytes, counted from `start`."""
    file.seek(start)
    return file.read(size).rfind(b"\n") + 1


def _cut_gzip(stretch: Segment, step: int, longest: int, goes_on: bool) -> Iterator[_Piece]:
    with gzip.open(stretch.path, "rb") as file:
        start = 0
        while data := _unpacked(stretch.path, file.read, step):
            begin = data.rfind(b"\n") + 1
            rest, room = [], longest + 1 - (len(data) - begin) if begin < len(data) else 0
            while room > 0 and (piece := _unpacked(stretch.path, file.readline, min(room, _STEP))):
                rest.append(piece)
                room = 0 if piece.endswith(b"\n") else room - len(piece)
            end = start + len(data) + sum(map(len, rest))
            newline = (rest or [data])[-1].endswith(b"\n")
            if end - start - begin - newline <= longest:
                data = b"".join([data, *rest])
                yield start, end, data, True
                start = end
                continue
            if begin:
                yield start, start + begin, data[:begin], True
            rest.clear()
            while goes_on and (piece := _unpacked(stretch.path, file.readline, _STEP)):
                end += len(piece)
                if piece.endswith(b"\n"):
                    break
            yield start + begin, end, b"", False
            start = end


def _unpacked(path: str, read: Callable[[int], bytes], size: int) -> bytes:
    try:
        return read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"`{path}` must be a whole gzip file, but is damaged ({error}); fetch it again."
        ) from error


@dataclass(frozen=True)
class Problem:
    """An unusable line. `line` counts from 0 in its chunk; `reason` is the class, `detail` the case."""

    line: int
    reason: str
    detail: str

    @classmethod
    def of_length(cls, chunk: Chunk) -> Problem:
        """The one of a line that is too long."""
        return cls(0, "too long", f"the line has more than {chunk.beyond} bytes")


@dataclass
class Column:
    """The documents of one json key: `texts` in a row, `counts` texts in each document (None: one each)."""

    texts: list[str]
    counts: list[int] | None = None

    @classmethod
    def of(cls, documents: Sequence[Sequence[str]]) -> Column:
        """The column of these documents, each given as its texts."""
        return cls([text for texts in documents for text in texts], [len(texts) for texts in documents])


@dataclass
class Parsed:
    """A chunk's usable documents, one column per key, and its bad lines. `lines` counts blank ones too."""

    lines: int
    columns: list[Column]
    problems: list[Problem] = field(default_factory=list)


def split_lines(chunk: Chunk, data: bytes) -> list[bytes]:
    """The lines without their newlines; a byte order mark at the start of a file is dropped."""
    if chunk.start == 0 and data.startswith(_BOM):
        data = data[len(_BOM) :]
    lines = data.split(b"\n")
    return lines[:-1] if not lines[-1] else lines


def fast_loads() -> Callable[[bytes], Any]:
    """A JSON reader for good lines: orjson's if installed, else Python's. What it refuses is read again with
    `_STRICT`, which decides; what it accepts, `_STRICT` accepts with the same strings."""
    try:
        import orjson
    except ImportError:
        return lambda line: _STRICT.decode(str(line, "utf-8"))
    loads: Callable[[bytes], Any] = orjson.loads
    return loads


def _refuses_halves(loads: Callable[[bytes], Any]) -> bool:
    """Whether this reader refuses texts that hold half of a surrogate pair (orjson 3.13 does, `json` does
    not)."""
    for half in _HALVES:
        try:
            loads(half)
        except ValueError:
            continue
        return False
    return True


def parse(lines: Sequence[bytes], keys: Sequence[str], split: Split | None = None) -> Parsed:
    """The documents of these lines. JSON means what Python's `json` accepts: the last of two equal keys
    counts, NaN is a number; but UTF-8 must be strict and a text must not hold half of a surrogate pair.

    `split` makes several texts of each; a list of texts stays as it is. Raises what it raises.
    """
    columns = _parse_all_good(lines, keys)
    if columns is None:
        return parse_carefully(lines, keys, split=split)
    if split is None:
        return Parsed(len(lines), [Column(texts) for texts in columns])
    return Parsed(len(lines), [_split_all(texts, split) for texts in columns])


def _split_all(texts: list[str], split: Split) -> Column:
    documents = list(map(split, texts))
    return Column(list(chain.from_iterable(documents)), list(map(len, documents)))


def _parse_all_good(lines: Sequence[bytes], keys: Sequence[str]) -> list[list[str]] | None:
    """Parse all lines at once if each is an object with a plain string under every key; else return None."""
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
    # Looking for halves takes a tenth of a chunk's time; it is skipped if the reader has done so.
    for texts in [] if _refuses_halves(loads) else columns:
        for line, text in zip(lines, texts, strict=True):
            # Only an escape can smuggle in half of a surrogate pair; isascii() costs nothing.
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
    """Parse line by line. A line that is bad under one key is left out under all, so columns stay aligned.

    `accept`, and `split` (see `parse`), may raise DataError for a text that they cannot take.
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
    """One list of texts per key, or the reason and detail of what is wrong."""
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
