"""Recognize what an input file is by its first bytes, and unpack what is compressed.

JSON lines may be plain, or packed by gzip (several members), zstd (several frames, windows of up to 2 GiB),
bzip2 or xz (several streams). Whatever is cut short or damaged is an error, never an early end: a reader that
stops after the first member, or that ignores what follows, would lose documents without a word.
"""

from __future__ import annotations

import gzip
import io
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import IO, Any, Literal, cast

from megazero.errors import DataError
from megazero.regular_file import open_regular

STDIN = "-"
"""The path that stands for standard input."""
InputKind = Literal["plain", "gzip", "zstd", "bzip2", "xz", "parquet", "arrow", "arrow stream"]
_MAGIC: tuple[tuple[bytes, InputKind], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"PAR1", "parquet"),
    (b"ARROW1\x00\x00", "arrow"),
    (b"\xff\xff\xff\xff", "arrow stream"),
)
_FOREIGN = ((b"PK\x03\x04", "a zip archive"), (b"7z\xbc\xaf", "a 7z archive"), (b"\x04\x22\x4d\x18", "lz4"))
_STEP = 1 << 20


def library(name: str, package: str, what: str) -> Any:
    """Import an optional library. Raises DataError with the line that installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(
            f"`{what}` must have the package {package}, but it is not installed; run `pip install {package}`."
        ) from error


def kind_of(path: str) -> InputKind:
    """The kind of a file, by its first bytes. Raises DataError for an archive that cannot be read."""
    if path == STDIN:
        waiting: bytes = cast(io.BufferedReader, sys.stdin.buffer).peek(8)
        return _kind_by(waiting[:8], path)
    with open_regular(path) as file:
        return _kind_by(file.read(8), path)


def _kind_by(head: bytes, path: str) -> InputKind:
    foreign = next((what for magic, what in _FOREIGN if head.startswith(magic)), None)
    if foreign is not None:
        raise DataError(
            f"`{path}` must be JSON lines (plain, or by gzip, zstd, bzip2 or xz), Parquet or Arrow, but is "
            f"{foreign}; unpack it first."
        )
    if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:  # a frame that is skipped, as pzstd begins
        return "zstd"
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), "plain")


def is_table(kind: InputKind) -> bool:
    """Whether a kind of file has rows and columns instead of lines."""
    return kind in ("parquet", "arrow", "arrow stream")


def size_of(path: str) -> int:
    """The bytes of a file; 0 for standard input, which are not known."""
    return 0 if path == STDIN else os.path.getsize(path)


def open_unpacked(path: str, kind: InputKind) -> IO[bytes]:
    """Open JSON lines for reading from the start to the end, unpacked. Raises DataError as `kind_of` does."""
    source: IO[bytes] = sys.stdin.buffer if path == STDIN else open_regular(path)
    if kind == "plain":
        return source
    if kind == "gzip":
        return cast(IO[bytes], _gzip_reader(source))
    if kind == "zstd":
        pieces = _zstd_blocks(source, path)
    else:
        module, name = ("bz2", "BZ2Decompressor") if kind == "bzip2" else ("lzma", "LZMADecompressor")
        pieces = _streams(source, getattr(library(module, f"{module} (a part of Python)", path), name))
    return io.BufferedReader(_PieceReader(pieces), _STEP)


def read_unpacked(path: str, kind: InputKind, read: Callable[[int], bytes], size: int) -> bytes:
    """Call `read(size)` of an unpacked file. Raises DataError if the file is damaged."""
    try:
        return read(size)
    except Exception as error:  # of five libraries: EOFError, OSError, zlib.error, LZMAError, ZstdError
        if isinstance(error, DataError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise DataError(
            f"`{path}` must be a whole {kind} file, but is damaged ({error}); fetch it again."
        ) from error


def _gzip_reader(file: IO[bytes]) -> object:
    """A reader by the library of the extra `fast`, which is twice as fast, or else by Python's."""
    try:
        reader: Any = import_module("isal.igzip").IGzipFile
    except ImportError:
        reader = gzip.GzipFile
    return reader(fileobj=file)


class _PieceReader(io.RawIOBase):
    """A stream of the bytes that an iterator yields."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _streams(file: IO[bytes], decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """Yield what streams hold, one after the other. Raises EOFError if the last is cut."""
    current, data = None, b""
    while data or (data := file.read(1 << 16)):
        if current is None:
            data = data.lstrip(b"\0")  # xz may pad between streams
            if not data:
                continue
            current = decompressor()
        yield current.decompress(data, _STEP)
        while not (current.eof or current.needs_input):
            yield current.decompress(b"", _STEP)
        data = current.unused_data if current.eof else b""
        current = None if current.eof else current
    if current is not None:
        raise EOFError("it ends before its end mark")


def _zstd_blocks(file: IO[bytes], path: str) -> Iterator[bytes]:
    """Yield what frames hold, one block of at most 128 KiB after the other. Raises EOFError if one is cut.

    The library reports a frame that is cut as the end, so blocks are counted here (RFC 8878, section 3.1.1).
    """
    zstandard = library("zstandard", "zstandard", path)
    while magic := file.read(4):
        if magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5:
            left = int.from_bytes(_exactly(file, 4), "little")
            while left:
                left -= len(_exactly(file, min(left, _STEP)))
            continue
        flags = _exactly(file, 1)
        single, dictionary, size = flags[0] >> 5 & 1, flags[0] & 3, flags[0] >> 6
        rest = (1 - single) + (0, 1, 2, 4)[dictionary] + (single, 2, 4, 8)[size]
        frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        yield frame.decompress(magic + flags + _exactly(file, rest))
        last = 0
        while not last:
            block = _exactly(file, 3)
            number = int.from_bytes(block, "little")
            last, of_one_byte = number & 1, number >> 1 & 3 == 1
            yield frame.decompress(block + _exactly(file, 1 if of_one_byte else number >> 3))
        if flags[0] & 4:
            yield frame.decompress(_exactly(file, 4))


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise EOFError("it ends in the middle of a frame")
    return data
