"""Cut inputs between rows: into chunks for workers, and into contiguous parts for partitions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from megazero.data_tools.preprocessing.inputs import (
    STDIN,
    InputKind,
    is_table,
    kind_of,
    open_unpacked,
    read_unpacked,
    size_of,
)
from megazero.data_tools.preprocessing.parsing import LineRows, Problem, Rows
from megazero.data_tools.preprocessing.tables import TableRows, TableSlices, groups_of, rows_before
from megazero.errors import DataError

# Small enough that a chunk, its lines, texts and tokens stay in the processor's cache, and that the allocator
# reuses their memory for the next chunk; each chunk of 8 MiB was mapped anew, page by page.
CHUNK_BYTES = 2 << 20
LONGEST_LINE = 256 << 20
"""The most bytes of a line by default; a few kilobytes of gzip can unpack to a line that fills memory."""
_STEP = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class JsonlChunk:
    """Whole lines of a file: bytes `start` to `end`, or `data` itself if the file is compressed.

    Or rows of a table, from `start` to `end`, which `data` holds. If the chunk is a single line or row that
    is too long to read, `beyond` is the limit that it exceeds, in bytes.
    """

    number: int
    path: str
    start: int
    end: int
    data: bytes | None = None
    beyond: int | None = None
    is_table: bool = False

    @property
    def item(self) -> str:
        """The name of a row."""
        return "row" if self.is_table else "line"

    def too_long(self) -> Problem:
        """The problem of a chunk with `beyond`."""
        return Problem.of_length(self.item, self.beyond)

    def rows(self, data: bytes) -> Rows:
        """Divide the bytes that were read into rows; a byte order mark at the start of a file is dropped."""
        if self.is_table:
            return TableRows.of(data)
        if self.start == 0 and data.startswith(_BOM):
            data = data[len(_BOM) :]
        lines = data.split(b"\n")
        return LineRows(lines if lines[-1] else lines[:-1])

    def read(self) -> bytes:
        """Read the chunk's bytes. Raises DataError if the file has become shorter."""
        if self.data is not None:
            return self.data
        with open(self.path, "rb") as file:
            file.seek(self.start)
            data = file.read(self.end - self.start)
        if len(data) != self.end - self.start:
            raise DataError(f"`{self.path}` must not change while it is read, but became shorter; run again.")
        return data

    def __str__(self) -> str:
        if self.is_table:
            return f"rows {self.start}..{self.end} of {self.path}"
        kind = "" if self.data is None else " when unpacked"
        return f"bytes {self.start}..{self.end} of {self.path}{kind}"


@dataclass(frozen=True)
class FileSegment:
    """Whole lines of a file, from byte `start` to `end` (None: to its end); all of a compressed file.

    Of a table, `start` and `end` count row groups (Parquet) or record batches (Arrow).
    """

    path: str
    start: int = 0
    end: int | None = None


def cut(
    sources: Sequence[str | FileSegment],
    chunk_bytes: int = CHUNK_BYTES,
    longest: int = LONGEST_LINE,
    *,
    goes_on: bool = False,
    keys: Sequence[str] = ("text",),
) -> Iterator[JsonlChunk]:
    """Yield the chunks of files or segments in order; their ends depend on the arguments alone.

    A chunk is `chunk_bytes` long, plus the rest of its last line. Compressed files and tables, of which the
    columns `keys` are taken, are unpacked here; other files are read by `JsonlChunk.read`. A line or row of
    more than `longest` bytes, without its newline, is a chunk of its own and never wholly in memory; it is
    the last chunk unless `goes_on`.
    """
    # With steps of at most `longest` bytes, only the last line of a chunk can be too long.
    step, number = min(chunk_bytes, longest), 0
    for source in sources:
        segment = FileSegment(source) if isinstance(source, str) else source
        kind = kind_of(segment.path)
        path = "standard input" if segment.path == STDIN else segment.path
        for start, end, data, fits in _pieces(segment, kind, keys, step, longest, goes_on):
            yield JsonlChunk(number, path, start, end, data, None if fits else longest, is_table(kind))
            if not fits and not goes_on:
                return
            number += 1


# (start, end, the bytes if the file is compressed, whether the piece is short enough to read)
_Piece = tuple[int, int, bytes | None, bool]


def _pieces(
    segment: FileSegment, kind: InputKind, keys: Sequence[str], step: int, longest: int, goes_on: bool
) -> Iterator[_Piece]:
    if is_table(kind):
        if segment.path == STDIN:
            raise DataError(f"`--input -` must be JSON lines, but is {kind}; give the file itself.")
        return iter(TableSlices(segment.path, kind, keys, segment.start, segment.end, step, longest))
    if kind == "plain" and segment.path != STDIN:
        return _cut_plain(segment, step, longest, goes_on)
    return _cut_unpacked(segment.path, kind, step, longest, goes_on)


def _cut_plain(stretch: FileSegment, step: int, longest: int, goes_on: bool) -> Iterator[_Piece]:
    with open(stretch.path, "rb") as file:
        start = stretch.start
        last = os.fstat(file.fileno()).st_size if stretch.end is None else stretch.end
        while start < last:
            # From the last byte of the step, so that a newline there ends the chunk.
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
    """Go to the start of the next line; returns the bytes that were left of the line, without its newline.

    Stops once `most` bytes are read. Keeps at most a megabyte in memory.
    """
    count = 0
    while (most is None or count < most) and (
        piece := file.readline(_STEP if most is None else min(_STEP, most - count))
    ):
        count += len(piece)
        if piece.endswith(b"\n"):
            return count - 1
    return count


def _last_line(file: IO[bytes], start: int, size: int) -> int:
    """The offset from `start` at which the last line that begins within `size` bytes begins."""
    file.seek(start)
    return file.read(size).rfind(b"\n") + 1


def _cut_unpacked(path: str, kind: InputKind, step: int, longest: int, goes_on: bool) -> Iterator[_Piece]:
    with open_unpacked(path, kind) as file:
        start = 0
        while data := read_unpacked(path, kind, file.read, step):
            begin = data.rfind(b"\n") + 1
            rest, room = [], longest + 1 - (len(data) - begin) if begin < len(data) else 0
            while room > 0 and (piece := read_unpacked(path, kind, file.readline, min(room, _STEP))):
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
            while goes_on and (piece := read_unpacked(path, kind, file.readline, _STEP)):
                end += len(piece)
                if piece.endswith(b"\n"):
                    break
            yield start + begin, end, b"", False
            start = end


def divide(paths: Sequence[str], parts: int) -> list[list[FileSegment]]:
    """Divide files into `parts` contiguous lists of segments of about equal size, whose concatenation is all.

    A plain file is cut after newlines, a table between row groups, a compressed file never; a list may be
    empty.
    """
    sizes = [size_of(path) for path in paths]
    total = max(sum(sizes), 1)
    shares: list[list[FileSegment]] = [[] for _ in range(parts)]
    before = 0
    for path, size in zip(paths, sizes, strict=True):
        part, start, kind = min(before * parts // total, parts - 1), 0, kind_of(path)
        count = groups_of(path, kind) if is_table(kind) else size
        if (kind != "plain" and not is_table(kind)) or path == STDIN:
            shares[part].append(FileSegment(path))
            start = count
        while start < count:
            at = max(0, total * (part + 1) // parts - before)
            end = max(start, at * count // size) if is_table(kind) else _line_end(path, max(start, at), size)
            end = min(end, count)
            if end > start:
                shares[part].append(FileSegment(path, start, end))
            part, start = part + 1, end
        before += size
    return shares


def aligned(nominal: FileSegment) -> FileSegment:
    """The whole lines that begin in a range of bytes of a plain file; any other segment as it is."""
    if nominal.end is None or kind_of(nominal.path) != "plain":
        return nominal
    size = size_of(nominal.path)
    start, end = (_line_end(nominal.path, at, size) for at in (nominal.start, nominal.end))
    return FileSegment(nominal.path, start, end)


def _line_end(path: str, at: int, size: int) -> int:
    """The end of the line that the byte before `at` belongs to."""
    if at == 0 or at >= size:
        return min(at, size)
    with open(path, "rb") as file:
        file.seek(at - 1)
        skip_line(file)
        return file.tell()


def lines_before(stretch: FileSegment) -> int:
    """Count the lines, or the rows, of the file before a segment."""
    if is_table(kind := kind_of(stretch.path)):
        return rows_before(stretch.path, kind, stretch.start)
    count, left = 0, stretch.start
    with open(stretch.path, "rb") as file:
        while left and (block := file.read(min(left, _STEP))):
            count += block.count(b"\n")
            left -= len(block)
    return count
