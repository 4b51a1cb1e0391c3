"""Cut jsonl files at newlines: into chunks for workers, and into contiguous parts for partitions."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from megazero.errors import DataError

# Small enough that a chunk, its lines, texts and tokens stay in the processor's cache, and that the allocator
# reuses their memory for the next chunk; each chunk of 8 MiB was mapped anew, page by page.
CHUNK_BYTES = 2 << 20
LONGEST_LINE = 256 << 20
"""The most bytes of a line by default; a few kilobytes of gzip can unpack to a line that fills memory."""
_STEP = 1 << 20


@dataclass(frozen=True)
class JsonlChunk:
    """Whole lines of a file: bytes `start` to `end`, or `data` itself if the file is compressed.

    If the chunk is a single line that is too long to read, `beyond` is the limit that it exceeds, in bytes.
    """

    number: int
    path: str
    start: int
    end: int
    data: bytes | None = None
    beyond: int | None = None

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
        kind = "" if self.data is None else " when unpacked"
        return f"bytes {self.start}..{self.end} of {self.path}{kind}"


@dataclass(frozen=True)
class FileSegment:
    """Whole lines of a file, from byte `start` to `end` (None: to its end); all of a compressed file."""

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
    """Yield the chunks of files or segments in order; their ends depend on the arguments alone.

    A chunk is `chunk_bytes` long, plus the rest of its last line. Compressed files (gzip, recognized by their
    first bytes) are unpacked here; other files are read by `JsonlChunk.read`. A line of more than `longest`
    bytes, without its newline, is a chunk of its own and never wholly in memory; it is the last chunk unless
    `goes_on`.
    """
    # With steps of at most `longest` bytes, only the last line of a chunk can be too long.
    step, number = min(chunk_bytes, longest), 0
    for source in sources:
        segment = FileSegment(source) if isinstance(source, str) else source
        cut_file = _cut_gzip if is_gzip(segment.path) else _cut_plain
        for start, end, data, fits in cut_file(segment, step, longest, goes_on):
            yield JsonlChunk(number, segment.path, start, end, data, None if fits else longest)
            if not fits and not goes_on:
                return
            number += 1


def is_gzip(path: str) -> bool:
    """Whether a file is compressed, by its first bytes."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


# (start, end, the bytes if the file is compressed, whether the piece is short enough to read)
_Piece = tuple[int, int, bytes | None, bool]


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
    """Divide files into `parts` contiguous lists of segments of about equal size, whose concatenation is all.

    A plain file is cut after newlines, a compressed file never; a list may be empty.
    """
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
    """Count the lines of the file before a segment."""
    count, left = 0, stretch.start
    with open(stretch.path, "rb") as file:
        while left and (block := file.read(min(left, _STEP))):
            count += block.count(b"\n")
            left -= len(block)
    return count
