"""Say what the first samples of a GPT dataset read: where text comes again, and which text never comes.

Sample k reads the inputs k T to k T + T - 1 of the shuffled sequences laid end to end, epoch after epoch. So
each token of the split is there once for each epoch, and two samples that read one token of the file are a
repeat. The index of the training says which these are. Without one, they are estimated: the copies of a text
are then taken to be drawn independently, which they nearly are.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.index_build import GPTIndex
from megazero.data.indexed.reader import IndexedDataset


class Coverage(NamedTuple):
    """The first sample that reads a token again (None if none does), and what no sample reads a token of."""

    first_repeat: int | None
    unseen_tokens: int
    unseen_sequences: int


class PlannedDataset(GPTDataset):
    """A GPT dataset whose index is built if it has at most `limit` entries, and is else empty."""

    def __init__(
        self, indexed: IndexedDataset, ids: range, num_samples: int | None, settings: GPTSettings, limit: int
    ):
        self.limit, self.first, self.lengths = limit, ids.start, indexed.lengths[ids.start : ids.stop]
        super().__init__(indexed, ids, num_samples, settings)

    @property
    def is_built(self) -> bool:
        """Whether there is an index."""
        return self.plan.epochs * self.lengths.size + self.plan.samples <= self.limit

    def _cached_index(self) -> GPTIndex:
        empty = np.empty(0, dtype=np.int64)
        return super()._cached_index() if self.is_built else GPTIndex(empty, empty, empty)


def covered(dataset: PlannedDataset, samples: int) -> Coverage:
    """Say what the first `samples` samples read: counted if there is an index, else estimated."""
    if not dataset.is_built:
        return _estimated(dataset, samples)
    begins, ends, times = _pieces(dataset)
    first = None
    if dataset.plan.epochs > 1:
        by_place = np.argsort(begins, kind="stable")
        low, high, when = begins[by_place], ends[by_place], times[by_place]

        def overlap(count: int) -> bool:
            """Whether two of the first `count` samples read the same token."""
            return bool((low[when < count][1:] < high[when < count][:-1]).any())

        first = bisect_left(range(samples + 1), True, key=overlap) - 1
    undrawn = times >= samples
    return Coverage(
        first if first is not None and first < samples else None,
        *_unseen(dataset, begins[undrawn], ends[undrawn]),
    )


def _pieces(dataset: PlannedDataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All texts that lie in one sequence and one sample, int64 [p] each.

    Returns their first tokens and their ends in the file, and the place of their sample in the training.
    """
    plan, index, indexed = dataset.plan, dataset.index, dataset.indexed
    documents, size = index.document_index[:], plan.sequence_length
    ends = np.cumsum(indexed.lengths[documents], dtype=np.int64)
    borders = np.arange(plan.samples + 1, dtype=np.int64) * size
    cuts = np.sort(np.concatenate([ends, borders]), kind="stable")  # which merges two runs
    cuts = cuts[np.diff(cuts, prepend=-1) > 0]
    places = np.searchsorted(ends, cuts[:-1], side="right")
    sequences = documents[places]
    offsets = cuts[:-1] - (ends[places] - indexed.lengths[sequences])
    begins = indexed.offsets[sequences] // indexed.dtype.itemsize + offsets
    times = np.full(plan.samples + 1, plan.samples, dtype=np.int64)  # the rest of the last epoch never comes
    times[index.shuffle_index[:]] = np.arange(plan.samples)
    return begins, begins + np.diff(cuts), times[np.minimum(cuts[:-1] // size, plan.samples)]


def _unseen(dataset: PlannedDataset, begins: np.ndarray, ends: np.ndarray) -> tuple[int, int]:
    """The tokens and whole sequences of which no copy is drawn, by the pieces that are not."""
    borders = np.concatenate([begins, ends])
    order = np.argsort(borders, kind="stable")
    borders, copies = borders[order], np.cumsum(np.repeat([1, -1], begins.size)[order])
    missing = np.diff(borders) * (copies[:-1] == dataset.plan.epochs)
    places = borders[:-1][missing > 0] * dataset.indexed.dtype.itemsize
    owners = np.searchsorted(dataset.indexed.offsets, places, "right") - 1 - dataset.first
    unread = np.bincount(owners, weights=missing[missing > 0], minlength=dataset.lengths.size)
    return int(missing.sum()), int(((unread == dataset.lengths) & (dataset.lengths > 0)).sum())


def _estimated(dataset: PlannedDataset, samples: int) -> Coverage:
    """Estimate the coverage from the plan and the lengths.

    Of two copies of a sequence of L tokens, about 2 L / T + 1 pairs of samples read the same token. The mean
    number of samples until both of one pair have come is that of the birthday problem.
    """
    plan = dataset.plan
    whole, copies = plan.samples, plan.epochs  # samples shuffled together, and copies of each token in them
    if plan.separate_last:
        whole, copies = plan.samples_before_last, plan.epochs - 1
    left = 1 - min(1.0, samples / max(1, whole))
    parts = dataset.lengths[dataset.lengths > 0] / plan.sequence_length
    pairs = math.comb(copies, 2) * float((2 * parts + 1).sum())
    first = round(whole * math.sqrt(math.pi / (4 * pairs))) if pairs else whole
    tokens = round(plan.tokens_per_epoch * left**copies)
    if plan.epochs == 1:  # no token is in two samples
        first, tokens = samples, plan.tokens_per_epoch - samples * plan.sequence_length
    sequences = round(float((left ** (copies * (parts + 1))).sum()))
    return Coverage(first if first < samples else None, tokens, sequences)
