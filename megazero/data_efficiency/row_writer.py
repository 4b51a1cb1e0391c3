"""Writes files of integer rows that DeepSpeed, Megatron and `row_file` read in the same way.

Elements are int32 or int64, whose codes are the same for all three. All rows form one document, as in
DeepSpeed's files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from megazero.data.files import flush
from megazero.data.indexed.format import CODE_OF_DTYPE, MMIDIDX_HEADER, MMIDIDX_MAGIC
from megazero.data.indexed.reader import prefix_path
from megazero.errors import DataError

_INT32 = np.iinfo(np.int32)
_LONGEST = int(_INT32.max)
_BLOCK = 1 << 18  # bytes of lengths that are read at a time


def neutral_dtype(low: int, high: int) -> np.dtype:
    """The dtype for numbers from `low` to `high`: int32 if both fit, else int64."""
    return np.dtype("<i4") if low >= _INT32.min and high <= _INT32.max else np.dtype("<i8")


class RowIndexWriter:
    """Writes `prefix.idx` for a `prefix.bin` whose rows have the lengths given to `add`.

    dtype: of the elements. Lengths are spooled to a file, so that memory does not grow with their number.
    Raises DataError for a row too long for the format, and OSError if the disk refuses.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype):
        self._path = prefix_path(prefix, ".idx")
        self._spool = prefix_path(prefix, ".lengths")
        self._dtype = np.dtype(dtype)
        self._file = open(self._spool, "w+b", buffering=1 << 20)  # noqa: SIM115 (closed by close)
        self.rows = 0

    def add(self, lengths: np.ndarray) -> None:
        """Add the lengths of the next rows, integers [n]."""
        if lengths.size and int(lengths.max()) > _LONGEST:
            raise DataError(
                f"`samples` of one value must be at most {_LONGEST}, but are {int(lengths.max())}, which "
                "DeepSpeed's format has no room for; use a metric that tells more samples apart."
            )
        self._file.write(np.ascontiguousarray(lengths, dtype="<i4").tobytes())
        self.rows += lengths.size

    def close(self) -> None:
        """Write the index."""
        with self._file, open(self._path, "wb", buffering=1 << 20) as out:
            header = (MMIDIDX_MAGIC, 1, CODE_OF_DTYPE[self._dtype], self.rows, 2)
            out.write(MMIDIDX_HEADER.pack(*header))
            for lengths in _blocks(self._file):
                out.write(lengths.tobytes())
            end = 0
            for lengths in _blocks(self._file):
                ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize + end
                out.write(np.concatenate(([end], ends[:-1])).astype("<i8").tobytes())
                end = int(ends[-1])
            out.write(np.array([0, self.rows], dtype="<i8").tobytes())
            flush(out)
        self._spool.unlink()


def write_rows(prefix: str | Path, dtype: np.dtype, rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write both files from blocks of (elements, lengths of their rows); errors as in `RowIndexWriter`."""
    index = RowIndexWriter(prefix, dtype)
    with open(prefix_path(prefix, ".bin"), "wb", buffering=1 << 20) as out:
        for elements, lengths in rows:
            out.write(np.ascontiguousarray(elements, dtype=dtype).tobytes())
            index.add(lengths)
        flush(out)
    index.close()


def _blocks(file: IO[bytes]) -> Iterator[np.ndarray]:
    file.seek(0)
    while part := file.read(_BLOCK):
        yield np.frombuffer(part, dtype="<i4")
