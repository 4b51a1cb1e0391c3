"""The analyzer's own metrics: the length of a sample, and the rarity of its tokens.

The formulas are those of Megatron-DeepSpeed's `analyze_data.py` (DeepSpeed Data Efficiency, Li et al. 2022).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from megazero.data_efficiency.row_file import RowFile
from megazero.errors import DataError

VOCABULARY_COUNTS = "total_vocab_freq"
SHIPPED = ("seqlen", VOCABULARY_COUNTS, "vocab_rarity", "seqlen_vocab_rarity")
NEED_COUNTS = frozenset({"vocab_rarity", "seqlen_vocab_rarity"})
NEED_PADDING = frozenset({"seqlen", "seqlen_vocab_rarity"})


@dataclass(frozen=True)
class Samples:
    """A batch of `b` samples, in the form that metrics read.

    index: int64 [b], the sample numbers in the dataset. text: int64 [b, t], the token ids, with masked tokens
    restored; t is T + 1 for GPT samples, which read the token after the last. lengths: int64 [b], tokens
    before the padding; None without padding. arrays: the arrays of `SampleDataset.batch`.
    """

    index: np.ndarray
    text: np.ndarray
    lengths: np.ndarray | None
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, index: np.ndarray, arrays: Mapping[str, np.ndarray]) -> Samples:
        """The samples with these arrays; those of BERT, padded and masked, have an array `lengths`."""
        tokens, labels, lengths = arrays["tokens"], arrays["labels"], arrays.get("lengths")
        if lengths is None:
            text = np.concatenate([tokens, labels[:, -1:]], axis=1)
        else:
            text = np.where(arrays["loss_mask"] > 0, labels, tokens)
        return cls(index, text, lengths, arrays)

    @cached_property
    def padding_mask(self) -> np.ndarray:
        """int64 [b, t], 1 for tokens and 0 for padding."""
        if self.lengths is None:
            return np.ones_like(self.text)
        return (np.arange(self.text.shape[1]) < self.lengths[:, None]).astype(np.int64)

    def as_dict(self) -> dict[str, np.ndarray]:
        """The dataset's arrays, and `text`, `padding_mask` and `index`, as Megatron-DeepSpeed names them."""
        return {
            **self.arrays,
            "text": self.text,
            "padding_mask": self.padding_mask,
            "index": self.index,
        }


class SampleMetric(Protocol):
    """A measure of samples; it can be pickled.

    name: of its folder and files. accumulates: whether it is a vector summed over the dataset, instead of a
    value for each sample. identity: everything that its values depend on besides the samples, as JSON.
    """

    @property
    def name(self) -> str: ...

    @property
    def accumulates(self) -> bool: ...

    @property
    def identity(self) -> Mapping[str, object]: ...

    def measure(self, samples: Samples) -> np.ndarray:
        """Measure a batch: int64 [b], one value per sample; a vector of any length if it accumulates."""


@dataclass(frozen=True)
class SequenceLength(SampleMetric):
    """`seqlen`: the number of tokens without padding."""

    name = "seqlen"
    accumulates = False

    @property
    def identity(self) -> Mapping[str, object]:
        return {"metric": self.name}

    def measure(self, samples: Samples) -> np.ndarray:
        if samples.lengths is None:
            return np.full(len(samples.text), samples.text.shape[1], dtype=np.int64)
        return samples.lengths


@dataclass(frozen=True)
class VocabularyCounts(SampleMetric):
    """`total_vocab_freq`: the number of occurrences of each id, without padding; int64 [vocab_size]."""

    vocab_size: int
    name = VOCABULARY_COUNTS
    accumulates = True

    @property
    def identity(self) -> Mapping[str, object]:
        return {"metric": self.name, "vocab_size": self.vocab_size}

    def measure(self, samples: Samples) -> np.ndarray:
        ids = samples.text if samples.lengths is None else samples.text[samples.padding_mask > 0]
        return np.bincount(ids.reshape(-1), minlength=self.vocab_size)


@dataclass(frozen=True, eq=False)
class RarityTable:
    """The rarity of each id in nats: float64 [ids], -ln of its share of all tokens.

    An id that never occurs is treated as if it had occurred once.
    """

    nats: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray) -> RarityTable:
        """The table for ids with these numbers of occurrences, int64 [ids]."""
        occurred = np.maximum(counts, 1).astype(np.float64)
        return cls(-np.log(occurred / occurred.sum()))

    @property
    def identity(self) -> str:
        return hashlib.blake2b(self.nats.tobytes(), digest_size=16).hexdigest()

    def sums(self, samples: Samples) -> np.ndarray:
        """The sum of rarities of each sample, float64 [b]. Raises DataError for an id beyond the table."""
        # Viewed as unsigned, a negative id is a large number.
        if int(samples.text.view(np.uint64).max()) >= self.nats.size:
            raise DataError(
                f"`{VOCABULARY_COUNTS}` must count every id of the dataset, but holds {self.nats.size} and "
                f"the text has id {int(samples.text.max())}; analyze {VOCABULARY_COUNTS} of it first."
            )
        nats = self.nats.take(samples.text, mode="clip")  # without bounds checks, 3 times as fast
        if samples.lengths is not None:
            nats *= samples.padding_mask
        sums: np.ndarray = nats.sum(axis=1)
        return sums


@dataclass(frozen=True, eq=False)
class VocabularyRarity(SampleMetric):
    """`vocab_rarity`: the sum of the rarities of a sample's tokens in nats, rounded down."""

    table: RarityTable
    name = "vocab_rarity"
    accumulates = False

    @property
    def identity(self) -> Mapping[str, object]:
        return {"metric": self.name, "table": self.table.identity}

    def measure(self, samples: Samples) -> np.ndarray:
        return self.table.sums(samples).astype(np.int64)


@dataclass(frozen=True, eq=False)
class LengthThenRarity(SampleMetric):
    """`seqlen_vocab_rarity`: orders by length, and samples of equal length by rarity.

    sequence_length: T of the samples. The value is length * c + rarity, where c is a power of ten that is at
    least ten times the largest possible rarity.
    """

    table: RarityTable
    sequence_length: int
    name = "seqlen_vocab_rarity"
    accumulates = False

    @property
    def coefficient(self) -> int:
        """The factor c. The largest possible rarity is T times that of the rarest id."""
        largest = self.sequence_length * float(self.table.nats.max())
        return 10 ** (math.ceil(math.log10(largest)) + 1) if largest > 0 else 1

    @property
    def identity(self) -> Mapping[str, object]:
        return {"metric": self.name, "table": self.table.identity, "coefficient": self.coefficient}

    def measure(self, samples: Samples) -> np.ndarray:
        rarity = self.table.sums(samples).astype(np.int64)
        return SequenceLength().measure(samples) * self.coefficient + rarity


def read_counts(prefix: str | Path) -> np.ndarray:
    """Read the counts in a `total_vocab_freq_metric_value` of either analyzer, int64 [ids].

    Raises DataError if the file is missing, damaged or not a single row, or if its numbers cannot be counts.
    """
    rows = RowFile(prefix)
    if len(rows) != 1 or not rows.elements.size:
        raise DataError(
            f"`{rows.path_idx}` must hold one row of counts, but holds {len(rows)} row(s) of "
            f"{rows.elements.size} numbers; analyze {VOCABULARY_COUNTS} again."
        )
    low, high = int(rows.elements.min()), int(rows.elements.max())
    if low < 0 or high > np.iinfo(np.int64).max or high == 0:
        raise DataError(
            f"`counts` in {rows.path_bin} must be from 0 on, and some above it, but span {low}..{high}; "
            f"analyze {VOCABULARY_COUNTS} again."
        )
    return rows.elements.astype(np.int64)
