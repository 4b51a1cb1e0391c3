"""Files of integer rows, as DeepSpeed's data analyzer writes them: `prefix.bin` and `prefix.idx`.

The layout is that of Megatron's indexed datasets (`megazero.data.indexed.format`), with one trap: the byte
that names the element type. Codes 1 to 5 agree, but 6, 7 and 8 are uint16, uint32 and uint64 to DeepSpeed and
float64, float32 and uint16 to Megatron. A file of an analyzer is read with DeepSpeed's table. The size of an
element, which the file gives away, tells the two apart for codes 6 and 8: a metric of float64 is refused, and
uint16 is read in either dialect. Code 7 is uint32, for no analyzer writes float32.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import numpy as np

from megazero.data.indexed.format import MMIDIDX_HEADER, MMIDIDX_MAGIC
from megazero.data.indexed.reader import prefix_path
from megazero.errors import DataError

DEEPSPEED_DTYPES = MappingProxyType(
    {
        1: np.dtype("u1"),
        2: np.dtype("i1"),
        3: np.dtype("<i2"),
        4: np.dtype("<i4"),
        5: np.dtype("<i8"),
        6: np.dtype("<u2"),
        7: np.dtype("<u4"),
        8: np.dtype("<u8"),
    }
)
_MEGATRON_DTYPES = MappingProxyType({6: np.dtype("<f8"), 8: np.dtype("<u2")})  # where the size differs


class RowFile:
    """The rows of a file, memory-mapped.

    prefix: path without .bin or .idx. Attributes: lengths, int32 [rows], of each row; elements, integer
    [sum of lengths], all rows one after the other. Raises DataError, naming the file, if one is missing, cut
    short or damaged, or if it holds floating-point numbers.
    """

    def __init__(self, prefix: str | Path):
        self.path_idx = prefix_path(prefix, ".idx")
        self.path_bin = prefix_path(prefix, ".bin")
        index, content = _map(self.path_idx, prefix), _map(self.path_bin, prefix)
        code, self.lengths, offsets = self._split(index)
        ends = np.cumsum(self.lengths, dtype=np.int64)
        total = int(ends[-1]) if ends.size else 0
        self.dtype = self._dtype(code, total, content.size)
        if not np.array_equal(offsets, (ends - self.lengths) * self.dtype.itemsize):
            raise DataError(
                f"`row offsets` of {self.path_idx} must follow from the lengths of the rows, but do not; "
                "the index is damaged: analyze the dataset again."
            )
        self.elements = content.view(self.dtype)

    def __len__(self) -> int:
        return self.lengths.size

    def _split(self, index: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        """(element code, lengths int32 [rows], offsets int64 [rows]) of the bytes of an `.idx`."""
        path = self.path_idx
        if index.size < MMIDIDX_HEADER.size:
            raise DataError(
                f"`{path}` must hold a header of {MMIDIDX_HEADER.size} bytes, but is {index.size} bytes "
                "long; the file is cut short: analyze the dataset again."
            )
        magic, version, code, rows, entries = MMIDIDX_HEADER.unpack(bytes(index[: MMIDIDX_HEADER.size]))
        if magic != MMIDIDX_MAGIC:
            raise DataError(
                f"`{path}` must start with {MMIDIDX_MAGIC!r}, but starts with {magic!r}; give the path of an "
                "analyzer's file."
            )
        expected = MMIDIDX_HEADER.size + 12 * rows + 8 * entries
        if version != 1 or index.size != expected:
            raise DataError(
                f"`{path}` must be version 1 and {expected} bytes for {rows} rows and {entries} document "
                f"entries, but is version {version} and {index.size} bytes; the file is damaged: analyze the "
                "dataset again."
            )
        offsets_at = MMIDIDX_HEADER.size + 4 * rows
        lengths = index[MMIDIDX_HEADER.size : offsets_at].view("<i4")
        if rows and int(lengths.min()) < 0:
            raise DataError(
                f"`row lengths` of {path} must not be negative, but one is {int(lengths.min())}; the index "
                "is damaged: analyze the dataset again."
            )
        return code, lengths, index[offsets_at : offsets_at + 8 * rows].view("<i8")

    def _dtype(self, code: int, total: int, size: int) -> np.dtype:
        """The type of `total` elements in `size` bytes."""
        dtype = DEEPSPEED_DTYPES.get(code)
        if dtype is None:
            raise DataError(
                f"`element code` of {self.path_idx} must be 1..8, but is {code}; the header is damaged."
            )
        if total * dtype.itemsize == size:
            return dtype
        other = _MEGATRON_DTYPES.get(code)
        if other is None or total * other.itemsize != size:
            raise DataError(
                f"`{self.path_bin}` must be {total * dtype.itemsize} bytes for {total} elements of "
                f"{dtype.name}, but is {size}; the file is cut short or belongs to another .idx: analyze the "
                "dataset again."
            )
        if other.kind == "f":
            raise DataError(
                f"`{self.path_bin}` must hold integers, but holds {other.name}; let the metric return "
                "integers, such as round(1000 * value)."
            )
        return other


def _map(path: Path, prefix: str | Path) -> np.ndarray:
    """The bytes of a file, uint8 [size], mapped; an empty file cannot be mapped and gives an empty array."""
    try:
        if path.stat().st_size == 0:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"`{path}` must be a readable file, but is not ({reason}); give an analyzer's file without .bin "
            f"or .idx, not {prefix}."
        ) from error
