"""Data: from token ids on disk to the batch of a training step.

What a newcomer finds here:

- `IndexedDatasetWriter`, `open_indexed`: write and read Megatron's `.bin`/`.idx` files.
"""

from __future__ import annotations

from megazero.data.indexed_format import dtype_for_vocab
from megazero.data.indexed_reader import IndexedDataset, LegacyIndexedDataset, open_indexed
from megazero.data.indexed_writer import IndexedDatasetWriter

__all__ = [
    "IndexedDataset",
    "IndexedDatasetWriter",
    "LegacyIndexedDataset",
    "dtype_for_vocab",
    "open_indexed",
]
