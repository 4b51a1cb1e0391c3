"""The metrics that come with the analyzer: lengths, and how rare the words of a sample are.

The formulas are those of Megatron-DeepSpeed's `analyze_data.py` (DeepSpeed Data Efficiency, Li et al. 2022).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megazero.data_efficiency.row_file import RowFile
from megazero.data_efficiency.samples import Samples
from megazero.errors import DataError

VOCABULARY_COUNTS = "total_vocab_freq"
SHIPPED = ("seqlen", VOCABULARY_COUNTS, "vocab_rarity", "seqlen_vocab_rarity")
NEED_COUNTS = frozenset({"vocab_rarity", "seqlen_vocab_rarity"})
NEED_PADDING = frozenset({"seqlen", "seqlen_vocab_rarity"})


class Metric(Protocol):
    """Something to measure. It can be pickled.

    name: of its folder and files. accumulates: whether it is summed over the dataset instead of one value for
    each sample. identity: all that its values depend on besides the samples, as JSON.
    """

    @property
    def name(self) -> str: ...

    @property
    def accumulates(self) -> bool: ...

    @property
    def identity(self) -> Mapping[str, object]: ...

    def measure(self, samples: Samples) -> np.ndarray:
        """int64 [b], one value for each sample; or, if it accumulates, a vector, int64 [any length]."""


@dataclass(frozen=True)
class SequenceLength(Metric):
    """`seqlen`: tokens that are no padding."""

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
class VocabularyCounts(Metric):
    """`total_vocab_freq`: how often each id occurs, padding left out. vocab_size: length of the vector."""

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
    """How rare each id is: float64 [ids], -ln of its share of all tokens, in nats. Ids that never occur count
    as if they had occurred once."""

    nats: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray) -> RarityTable:
        """The table for ids that occur so often, int64 [ids]."""
        occurred = np.maximum(counts, 1).astype(np.float64)
        return cls(-np.log(occurred / occurred.sum()))

    @property
    def identity(self) -> str:
        return hashlib.blake2b(self.nats.tobytes(), digest_size=16).hexdigest()

    def sums(self, samples: Samples) -> np.ndarray:
        """The sum over each sample's tokens, float64 [b]. Raises DataError for an id beyond the table."""
        # As unsigned numbers, ids below 0 are large too.
        if int(samples.text.view(np.uint64).max()) >= self.nats.size:
            raise DataError(
                f"`{VOCABULARY_COUNTS}` must count every id of the dataset, but holds {self.nats.size} and "
                f"the text has id {int(samples.text.max())}; analyze {VOCABULARY_COUNTS} of it first."
            )
        nats = self.nats.take(samples.text, mode="clip")  # without a second look at each id, 3 times as fast
        if samples.lengths is not None:
            nats *= samples.padding_mask
        sums: np.ndarray = nats.sum(axis=1)
        return sums


@dataclass(frozen=True, eq=False)
class VocabularyRarity(Metric):
    """`vocab_rarity`: the rarities of a sample's tokens, summed, in nats; what follows the point is cut."""

    table: RarityTable
    name = "vocab_rarity"
    accumulates = False

    @property
    def identity(self) -> Mapping[str, object]:
        return {"metric": self.name, "table": self.table.identity}

    def measure(self, samples: Samples) -> np.ndarray:
        return self.table.sums(samples).astype(np.int64)


@dataclass(frozen=True, eq=False)
class LengthThenRarity(Metric):
    """`seqlen_vocab_rarity`: sorts by length, and by rarity within a length.

    sequence_length: T of the samples. The value is length * c + rarity, with the power of ten c that is at
    least ten times as large as any rarity can be.
    """

    table: RarityTable
    sequence_length: int
    name = "seqlen_vocab_rarity"
    accumulates = False

    @property
    def coefficient(self) -> int:
        """The factor c; it needs log10 of the largest possible rarity, T times that of the rarest id."""
        largest = self.sequence_length * float(self.table.nats.max())
        return 10 ** (math.ceil(math.log10(largest)) + 1) if largest > 0 else 1

    @property
    def identity(self) -> Mapping[str, object]:
        return {"metric": self.name, "table": self.table.identity, "coefficient": self.coefficient}

    def measure(self, samples: Samples) -> np.ndarray:
        rarity = self.table.sums(samples).astype(np.int64)
        return SequenceLength().measure(samples) * self.coefficient + rarity


def read_counts(prefix: str | Path) -> np.ndarray:
    """The counts in a `total_vocab_freq_metric_value`, ours or DeepSpeed's, int64 [ids].

    Raises DataError if the file is missing, damaged, not a single row, or holds what cannot be counts.
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
