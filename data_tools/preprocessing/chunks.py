"""Splits jsonl files at newlines and parses the pieces, naming every bad line."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from megazero.errors import DataError

# Small enough that a chunk, its lines, texts and tokens stay in the processor's cache, and that their memory
# is used again for the next chunk: chunks of 8 MiB were each mapped anew, page by page.
CHUNK_BYTES = 2 << 20
LONGEST_LINE = 256 << 20
"""Bytes that a line has at most, unless another number is given: a few kilobytes of gzip can unpack to one
line that fills any memory."""
_STEP = 1 << 20


@dataclass(frozen=True)
class JsonlChunk:
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
class FileSegment:
    """Whole lines of one file, from byte `start` to `end` (None: to its end). Of a compressed file, all."""

    path: str
    start: int = 0
    end: int | None = None


def cut(
    sources: Sequence[str | FileSegment],
    chunk_bytes: int = CHUNK_BYTES,
    longest: int = LONGEST_LINE,
    *,
    goes_on: bool = False,
) -> Iterator[JsonlChunk]:
    """The chunks of these files or stretches in order. Where one ends depends on the arguments alone.

    A chunk is `chunk_bytes` long, plus whatever completes its last line. Compressed files (gzip, recognized
    by their first bytes) are unpacked here; others are read by whoever processes the chunk. A line of more
    than `longest` bytes, without its newline, is a chunk of its own and never in memory as a whole; it is the
    last one unless this `goes_on`.
    """
    # So that a line within a chunk is never too long; only one that completes it may be.
    step, number = min(chunk_bytes, longest), 0
    for source in sources:
        stretch = FileSegment(source) if isinstance(source, str) else source
        divided = _cut_gzip if is_gzip(stretch.path) else _cut_plain
        for start, end, data, fits in divided(stretch, step, longest, goes_on):
            yield JsonlChunk(number, stretch.path, start, end, data, None if fits else longest)
            if not fits and not goes_on:
                return
            number += 1


def is_gzip(path: str) -> bool:
    """Whether the file is compressed, by its first bytes."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


# Start, end, the bytes if the file is compressed, and whether they may be read.
_Piece = tuple[int, int, bytes | None, bool]


def _cut_plain(stretch: FileSegment, step: int, longest: int, goes_on: bool) -> Iterator[_Piece]:
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


def _cut_gzip(stretch: FileSegment, step: int, longest: int, goes_on: bool) -> Iterator[_Piece]:
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


def divide(paths: Sequence[str], parts: int) -> list[list[FileSegment]]:
    """The stretches of each part. A plain file is cut after a newline, a compressed one not at all; a part
    may be left without any."""
    sizes = [os.path.getsize(path) for path in paths]
    total = max(sum(sizes), 1)
    shares: list[list[FileSegment]] = [[] for _ in range(parts)]
    before = 0
    for path, size in zip(paths, sizes, strict=True):
        part, start = min(before * parts // total, parts - 1), 0
        if is_gzip(path):
            shares[part].append(FileSegment(path))
            start = size
        while start < size:
            end = _line_end(path, max(start, total * (part + 1) // parts - before), size)
            if end > start:
                shares[part].append(FileSegment(path, start, end))
            part, start = part + 1, end
        before += size
    return shares


def _line_end(path: str, at: int, size: int) -> int:
    """The end of the line that the byte before `at` belongs to."""
    if at == 0 or at >= size:
        return min(at, size)
    with open(path, "rb") as file:
        file.seek(at - 1)
        skip_line(file)
        return file.tell()


def lines_before(stretch: FileSegment) -> int:
    """The number of lines of its file that come before a segment."""
    count, left = 0, stretch.start
    with open(stretch.path, "rb") as file:
        while left and (block := file.read(min(left, _STEP))):
            count += block.count(b"\n")
            left -= len(block)
    return count
