"""Data: from token ids on disk to the arrays of a training step.

What a newcomer finds here, bottom up:

- `indexed_format`, `indexed_checksum`, `indexed_reader`, `indexed_writer`: Megatron's `.bin`/`.idx` files,
  checked when read, whole or absent when written (`open_indexed`, `IndexedDatasetWriter`).
- `index_build`: the order of samples, Megatron-Core's own, as numpy references and compiled twins (`native`).
- `cache`: index arrays kept between runs, keyed by content. `splits`: split strings.
- `gpt_dataset`, `blended`: samples and mixtures of them, one at a time or in batches.
- `sampler`: which samples a rank takes next, a pure function of the samples consumed.
- `build`: `build_gpt_datasets(request)` puts all of it together.
- `tokenizers/`: text to ids and back.
"""

from __future__ import annotations

from megazero.data.blended import BlendedDataset, SampleDataset, parse_blend
from megazero.data.build import DatasetRequest, build_gpt_datasets
from megazero.data.gpt_dataset import GPTDataset, GPTSettings, MockGPTDataset
from megazero.data.indexed_format import dtype_for_vocab
from megazero.data.indexed_reader import IndexedDataset, LegacyIndexedDataset, open_indexed
from megazero.data.indexed_writer import IndexedDatasetWriter
from megazero.data.sampler import BatchSampler, SamplerKind, SamplerSpec, batch_indices, epoch_permutation
from megazero.data.splits import SplitReading, parse_split, split_ranges

__all__ = [
    "BatchSampler",
    "BlendedDataset",
    "DatasetRequest",
    "GPTDataset",
    "GPTSettings",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "LegacyIndexedDataset",
    "MockGPTDataset",
    "SampleDataset",
    "SamplerKind",
    "SamplerSpec",
    "SplitReading",
    "batch_indices",
    "build_gpt_datasets",
    "dtype_for_vocab",
    "epoch_permutation",
    "open_indexed",
    "parse_blend",
    "parse_split",
    "split_ranges",
]
