"""Writes files of rows byte by byte, as DeepSpeed lays them out, for tests of the reader."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 6, "<u4": 7, "<u8": 8}


def write_rows(
    prefix: Path, rows: Sequence[Sequence[int]], dtype: str = "<i8", code: int | None = None
) -> str:
    """A file of these rows, each ended as a document; `code` instead of DeepSpeed's for the type."""
    arrays = [np.array(row, dtype=dtype) for row in rows]
    lengths = np.array([len(row) for row in rows], dtype="<i4")
    starts = np.cumsum([0, *lengths[:-1]], dtype="<i8")[: len(rows)] * np.dtype(dtype).itemsize
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code or CODES[dtype], len(rows), len(rows) + 1)
    documents = np.arange(len(rows) + 1, dtype="<i8")
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + starts.tobytes() + documents.tobytes())
    Path(f"{prefix}.bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    return str(prefix)
