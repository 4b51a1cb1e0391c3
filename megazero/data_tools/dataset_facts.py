"""Compute statistics of an indexed dataset: lengths, histograms, packing, entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megazero.data.indexed.reader import IndexedDataset
from megazero.data.packed.packing import PackingFacts, pack
from megazero.errors import DataError

_BAR = 50
_BLOCK = 1 << 24
_LARGEST_ID = (1 << 26) - 1


@dataclass(frozen=True)
class LengthFacts:
    """Statistics of lengths, in tokens or sequences; all are zero without lengths."""

    min: int
    median: float
    mean: float
    max: int

    @staticmethod
    def of(lengths: np.ndarray) -> LengthFacts:
        """Compute the statistics of `lengths`, int [n]."""
        if not lengths.size:
            return LengthFacts(0, 0.0, 0.0, 0)
        middle = float(np.median(lengths))
        return LengthFacts(int(lengths.min()), middle, float(lengths.mean()), int(lengths.max()))


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """The tokens of each document, int64 [documents]."""
    before = np.concatenate([[0], np.cumsum(dataset.lengths, dtype=np.int64)])
    return np.diff(before[dataset.document_index])


def sequences_per_document(dataset: IndexedDataset) -> np.ndarray:
    """The number of sequences of each document, int64 [documents]."""
    return np.diff(dataset.document_index)


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Rows (first, last, count) of the ranges 0, 1, 2-3, 4-7, ..., up to the range of the longest length."""
    if not lengths.size:
        return []
    # frexp's exponent is exact, where log2 would round near powers of two.
    bins = np.bincount(np.frexp(lengths.astype(np.float64))[1])
    edges = [(0, 0), *((1 << b, (2 << b) - 1) for b in range(len(bins) - 1))]
    return [(first, last, int(count)) for (first, last), count in zip(edges, bins, strict=True)]


def print_histogram(rows: Sequence[tuple[int, int, int]]) -> None:
    """Print the rows of `histogram` with bars."""
    print("  documents by length in tokens")
    most = max((count for _, _, count in rows), default=1)
    for first, last, count in rows:
        bar = "#" * -(-count * _BAR // most)
        print(f"  {first:>12,} - {last:<12,} {count:>10,} {bar}".rstrip())


def packing_costs(dataset: IndexedDataset, length: int) -> dict[str, int]:
    """The costs of `--pack best-fit` with sequences of `length` tokens.

    Keys: sequence_length, documents (with tokens), sequences, padding (positions), cut (documents), and
    cut_end_to_end, the documents that are cut if all are concatenated in order instead.
    """
    sizes = document_lengths(dataset)
    lengths = sizes.astype(np.int32)
    facts = PackingFacts.of(sizes, length, pack(lengths, np.arange(sizes.size), length, 0).sequences)
    ends = np.cumsum(sizes)
    crossing = (ends - sizes) // length != np.maximum(ends - 1, 0) // length
    return {
        "sequence_length": length,
        "documents": facts.documents,
        "sequences": facts.sequences,
        "padding": facts.padding,
        "cut": facts.cut,
        "cut_end_to_end": int((crossing & (sizes > 0)).sum()),
    }


def token_counts(dataset: IndexedDataset) -> np.ndarray:
    """How often each id occurs, int64 [largest id + 1]. DataError for ids that no vocabulary has."""
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, dataset.total_tokens, _BLOCK):
        block = dataset.tokens[start : start + _BLOCK]
        if int(block.min()) < 0 or int(block.max()) > _LARGEST_ID:
            raise DataError(
                f"`token ids` of {dataset.prefix} must be in 0..{_LARGEST_ID}, but are "
                f"{int(block.min())} to {int(block.max())}; the dataset is damaged."
            )
        longer = np.bincount(block, minlength=len(counts))
        longer[: len(counts)] += counts
        counts = longer
    return counts


def unigram_entropy(dataset: IndexedDataset) -> float:
    """Entropy of the tokens' frequencies in nats per token; 0 for an empty dataset.

    It is the lowest loss of a model that predicts each token without its context.
    """
    counts = token_counts(dataset)
    seen = counts[counts > 0] / max(dataset.total_tokens, 1)
    return math.fsum(-seen * np.log(seen))
