"""Small datasets for the tests of megazero.data."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megazero.data.indexed.writer import IndexedDatasetWriter

GOLDEN_DOCUMENTS = [[[11, 12, 13], [14]], [[21]], [[31, 32, 33, 34, 35], [36, 37]]]
GOLDEN_SEQUENCES = [[11, 12, 13], [14], [21], [31, 32, 33, 34, 35], [36, 37]]
GOLDEN_IDX = bytes.fromhex(
    "4d4d49444944580000010000000000000008050000000000000004000000000000000300000001000000010000000500000002"
    "0000000000000000000000060000000000000008000000000000000a0000000000000014000000000000000000000000000000"
    "020000000000000003000000000000000500000000000000"
)
GOLDEN_BIN = bytes.fromhex("0b000c000d000e0015001f00200021002200230024002500")


def write_golden(prefix: Path) -> Path:
    """The golden dataset, made by the writer."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for document in GOLDEN_DOCUMENTS:
            writer.add_document([np.array(sequence) for sequence in document])
    return prefix


def write_bytes(prefix: Path, idx: bytes, tokens: bytes) -> Path:
    """A dataset of the given bytes, without checksums."""
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(tokens)
    return prefix


def write_lengths(prefix: Path, lengths: list[int] | np.ndarray, dtype: str = "uint16") -> Path:
    """One document per length; the ids count up from 0 over the whole dataset (modulo 60,000)."""
    total = int(np.sum(lengths))
    with IndexedDatasetWriter(prefix, dtype) as writer:
        writer.add_raw(np.arange(total) % 60000, np.asarray(lengths))
    return prefix
