"""Files of integer rows, as DeepSpeed's data analyzer writes them: `prefix.bin` and `prefix.idx`.

The layout is that of Megatron's indexed datasets (`megazero.data.indexed.format`), except for the code of the
element type. Codes 1 to 5 agree, but 6, 7 and 8 mean uint16, uint32 and uint64 in DeepSpeed, and float64,
float32 and uint16 in Megatron. An analyzer's file is read by DeepSpeed's table. For codes 6 and 8, the size
of an element, which follows from the file's size, tells the two apart: float64 is refused, and uint16 is read
in either coding. Code 7 is read as uint32, as no analyzer writes float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from megazero.data.indexed.format import (
    check_file_size,
    check_sequences,
    read_mmididx_header,
    split_mmididx,
)
from megazero.data.indexed.reader import map_file, prefix_path
from megazero.errors import DataError

DEEPSPEED_DTYPES: Mapping[int, np.dtype] = MappingProxyType(
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
# The codes for which the two tables differ in size.
_MEGATRON_DTYPES: Mapping[int, np.dtype] = MappingProxyType({6: np.dtype("<f8"), 8: np.dtype("<u2")})


class RowFile:
    """The memory-mapped rows of `prefix.bin` and `prefix.idx`.

    Attributes: lengths, int32 [rows], the length of each row; elements, integer [sum of lengths], all rows
    concatenated. Raises DataError, naming the file, if one is missing, cut short or damaged, or if it holds
    floating-point numbers.
    """

    def __init__(self, prefix: str | Path):
        self.path_idx = prefix_path(prefix, ".idx")
        self.path_bin = prefix_path(prefix, ".bin")
        index, content = map_file(self.path_idx), map_file(self.path_bin)
        code, rows, entries = read_mmididx_header(self.path_idx, index)
        check_file_size(self.path_idx, index.size, rows, entries)
        self.lengths, offsets, _ = split_mmididx(index, rows)
        self.dtype = self._dtype(code, int(self.lengths.sum(dtype=np.int64)), content.size)
        check_sequences(self.path_idx, self.lengths, offsets, self.dtype.itemsize, content.size)
        self.elements = content.view(self.dtype)

    def __len__(self) -> int:
        return self.lengths.size

    def _dtype(self, code: int, total: int, size: int) -> np.dtype:
        """The type of `total` elements in `size` bytes: DeepSpeed's, unless only Megatron's fits the size."""
        dtype = DEEPSPEED_DTYPES.get(code)
        if dtype is None:
            raise DataError(
                f"`element code` of {self.path_idx} must be 1..8, but is {code}; the header is damaged."
            )
        other = _MEGATRON_DTYPES.get(code)
        if total * dtype.itemsize == size or other is None or total * other.itemsize != size:
            return dtype
        if other.kind == "f":
            raise DataError(
                f"`{self.path_bin}` must hold integers, but holds {other.name}; let the metric return "
                "integers, such as round(1000 * value)."
            )
        return other
