"""What the first samples of a GPT dataset read of its text: where some comes again, and what never comes.

Sample k reads the inputs k T to k T + T - 1 of the shuffled sequences laid end to end, epoch after epoch. So
each token of the split is there once for each epoch, and two samples that read one token of the file are a
repeat. The index of the training says which these are. Without one, they are estimated: the copies of a text
are then taken to be drawn independently, which they nearly are.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.indexed.reader import IndexedDataset

_BLOCK = 1 << 22


@dataclass(frozen=True)
class Coverage:
    """What samples 0..n-1 read of a split.

    first_repeat: the first of these samples that reads a token again; None if none does. unseen_tokens,
    unseen_sequences: tokens that none of them reads, and sequences all of whose tokens are such. is_exact:
    whether this is counted in the index, rather than estimated.
    """

    first_repeat: int | None
    unseen_tokens: int
    unseen_sequences: int
    is_exact: bool


class PlannedDataset(GPTDataset):
    """A GPT dataset whose index is built if it has at most `limit` entries, and is else empty."""

    def __init__(
        self, indexed: IndexedDataset, ids: range, num_samples: int | None, settings: GPTSettings, limit: int
    ):
        self.split, self._limit = slice(ids.start, ids.stop), limit
        super().__init__(indexed, ids, num_samples, settings)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each sequence of the split, int32 [n]."""
        return self.indexed.lengths[self.split]

    def covered(self, samples: int) -> Coverage:
        """What the first `samples` samples read."""
        if not self._is_built:
            return _estimated(self, samples)
        pieces = _pieces(self)
        first = _first_overlap(pieces, samples) if self.plan.epochs > 1 else None
        return Coverage(first, *_unseen(self, pieces, samples), is_exact=True)

    @property
    def _is_built(self) -> bool:
        return self.plan.epochs * self.lengths.size + self.plan.samples <= self._limit

    def _build(self) -> dict[str, np.ndarray]:
        if self._is_built:
            return super()._build()
        none = np.empty(0, dtype=np.int64)
        return {"document_index": none, "sample_index": none, "shuffle_index": none}


@dataclass(frozen=True)
class _Pieces:
    """Texts that each lie in one sequence and one sample.

    begins, ends: tokens of the file, int64 [p]; times: the place of the sample in the order of the training,
    int64 [p].
    """

    begins: np.ndarray
    ends: np.ndarray
    times: np.ndarray


def _pieces(dataset: PlannedDataset) -> _Pieces:
    plan, index, indexed = dataset.plan, dataset.index, dataset.indexed
    documents, size = index.document_index, plan.sequence_length
    ends = np.cumsum(indexed.lengths[documents], dtype=np.int64)
    cuts = np.unique(np.concatenate([ends, np.arange(plan.samples + 1, dtype=np.int64) * size]))
    places = np.searchsorted(ends, cuts[:-1], side="right")
    sequences = documents[places]
    offsets = cuts[:-1] - (ends[places] - indexed.lengths[sequences])
    begins = indexed.offsets[sequences] // indexed.dtype.itemsize + offsets
    # What no sample reads, at the end of the last epoch, comes after all samples.
    times = np.full(plan.samples + 1, plan.samples, dtype=np.int64)
    times[index.shuffle_index] = np.arange(plan.samples)
    return _Pieces(begins, begins + np.diff(cuts), times[np.minimum(cuts[:-1] // size, plan.samples)])


def _first_overlap(pieces: _Pieces, samples: int) -> int | None:
    order = np.argsort(pieces.begins, kind="stable")
    begins, ends, times = pieces.begins[order], pieces.ends[order], pieces.times[order]

    def overlap(count: int) -> bool:
        """Whether two of the first `count` samples read the same token."""
        drawn = times < count
        return bool((begins[drawn][1:] < ends[drawn][:-1]).any())

    first = bisect_left(range(samples + 1), True, key=overlap) - 1
    return first if first < samples else None


def _unseen(dataset: PlannedDataset, pieces: _Pieces, samples: int) -> tuple[int, int]:
    """The tokens none of whose copies are in the first `samples` samples, and the sequences of such alone."""
    undrawn, indexed = pieces.times >= samples, dataset.indexed
    borders = np.concatenate([pieces.begins[undrawn], pieces.ends[undrawn]])
    steps = np.repeat([1, -1], borders.size // 2)
    order = np.argsort(borders, kind="stable")
    borders, copies = borders[order], np.cumsum(steps[order])
    missing = np.diff(borders) * (copies[:-1] == dataset.plan.epochs)
    begins = borders[:-1][missing > 0] * indexed.dtype.itemsize
    owners = np.searchsorted(indexed.offsets[dataset.split], begins, "right") - 1
    unread = np.bincount(owners, weights=missing[missing > 0], minlength=dataset.lengths.size)
    return int(missing.sum()), int(((unread == dataset.lengths) & (dataset.lengths > 0)).sum())


def _estimated(dataset: PlannedDataset, samples: int) -> Coverage:
    """Estimate the coverage from the plan and the lengths.

    Of two copies of a sequence of L tokens, about 2 L / T + 1 pairs of samples read the same token. The mean
    number of samples until both of one pair have come is that of the birthday problem.
    """
    plan, size = dataset.plan, dataset.plan.sequence_length
    # The samples that are shuffled together before a last epoch of its own, and the copies of a token there.
    whole, copies = plan.samples, plan.epochs
    if plan.separate_last:
        whole, copies = plan.samples_before_last, plan.epochs - 1
    left = 1 - min(1.0, samples / max(1, whole))
    sequences = pairs = 0.0
    for begin in range(0, dataset.lengths.size, _BLOCK):
        part = dataset.lengths[begin : begin + _BLOCK].astype(np.float64) / size
        part = part[part > 0]
        sequences += float((left ** (copies * (part + 1))).sum())
        pairs += math.comb(copies, 2) * float((2 * part + 1).sum())
    tokens = round(plan.tokens_per_epoch * left**copies)
    if plan.epochs == 1:  # exact: no token is in two samples
        tokens = plan.tokens_per_epoch - samples * size
    first = round(whole * math.sqrt(math.pi / (4 * pairs))) if pairs else whole
    return Coverage(first if plan.epochs > 1 and first < samples else None, tokens, round(sequences), False)
