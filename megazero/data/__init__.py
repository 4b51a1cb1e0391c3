"""Data: from token ids on disk to the arrays of a training step.

What is here, bottom up:

- `indexed/`: Megatron's `.bin`/`.idx` files, checked when read, whole or absent when written (`open_indexed`,
  `IndexedDatasetWriter`).
- `index_build`: the order of samples, Megatron-Core's own, as numpy references and compiled twins (`native`).
- `cache`: index arrays kept between runs, keyed by content. `splits`: split strings.
- `gpt_dataset`, `bert/`, `blended`: samples and mixtures of them, one at a time or in batches.
- `labelled/`: samples with labels, read from files as published, and the order of epochs.
- `token_ids`: that ids are of the vocabulary, looked at where a batch is made.
- `sources`: the files under a built dataset: whether they change, and what is in them.
- `sampler`, `shuffle`: which samples a rank takes next, a pure function of the samples consumed.
- `build`: `build_datasets(request)` puts all of it together; `gpt_datasets` and `bert_datasets` do so for a
  configuration.
- `tokenizers/`: text to ids and back.
"""

from __future__ import annotations

from megazero.data.bert import BERTBuilder, BERTDataset, BERTSettings, MockBERTDataset, WordPieces
from megazero.data.blended import BlendedDataset, SampleDataset, parse_blend
from megazero.data.build import (
    DatasetBuilder,
    DatasetRequest,
    Datasets,
    TextVocabulary,
    bert_datasets,
    build_datasets,
    gpt_datasets,
)
from megazero.data.gpt_dataset import GPTBuilder, GPTDataset, GPTSettings, MockGPTDataset
from megazero.data.indexed.format import dtype_for_vocab
from megazero.data.indexed.reader import IndexedDataset, LegacyIndexedDataset, open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.labelled import (
    UNKNOWN_LABEL,
    EpochOrder,
    LabelledFile,
    LabelledSamples,
    LabelledText,
    SampleEncoder,
    encode_samples,
    read_labelled,
)
from megazero.data.sampler import BatchSampler, SamplerKind, SamplerSpec, batch_indices, part_permutation
from megazero.data.sources import changed_files
from megazero.data.splits import SplitReading, parse_split, split_ranges
from megazero.data.token_ids import check_token_ids

__all__ = [
    "UNKNOWN_LABEL",
    "BERTBuilder",
    "BERTDataset",
    "BERTSettings",
    "BatchSampler",
    "BlendedDataset",
    "DatasetBuilder",
    "DatasetRequest",
    "Datasets",
    "EpochOrder",
    "GPTBuilder",
    "GPTDataset",
    "GPTSettings",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "LabelledFile",
    "LabelledSamples",
    "LabelledText",
    "LegacyIndexedDataset",
    "MockBERTDataset",
    "MockGPTDataset",
    "SampleDataset",
    "SampleEncoder",
    "SamplerKind",
    "SamplerSpec",
    "SplitReading",
    "TextVocabulary",
    "WordPieces",
    "batch_indices",
    "bert_datasets",
    "build_datasets",
    "changed_files",
    "check_token_ids",
    "dtype_for_vocab",
    "encode_samples",
    "gpt_datasets",
    "open_indexed",
    "parse_blend",
    "parse_split",
    "part_permutation",
    "read_labelled",
    "split_ranges",
]
