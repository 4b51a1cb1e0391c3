"""The sentences of each sample of a BERT dataset, in Megatron-Core's order.

The documents are walked in file order, epoch after epoch, until the samples suffice. Sentences of a document
are packed until they reach a target length; now and then the target is a short one, so that the model meets
other lengths than the full one too (Devlin et al. 2019). All rows of all epochs are then shuffled together.

`sample_map_reference` is the algorithm; the compiled twin (csrc/data) is used where it is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megazero.data.bert.mersenne import mersenne_64
from megazero.data.native import NATIVE
from megazero.errors import DataError

LONGEST_SENTENCE = 512  # tokens; a document of several sentences that has a longer one is left out
_DRAWS = 4096  # random numbers that the reference draws in one go


@dataclass(frozen=True)
class MapPlan:
    """A plan by which to pack sentences.

    num_samples: the least number of samples, over as many epochs as it takes; None: exactly `epochs` epochs.
    target: tokens of a full sample, without the special tokens; at least 2. min_sentences: 2 if a sample has
    two segments, else 1. short_seq_prob: share of the samples that have a shorter target; it is realized as
    1 / round(1 / short_seq_prob), so anything above 2/3 means every sample. seed: at least 0.
    """

    num_samples: int | None
    epochs: int
    target: int
    min_sentences: int
    short_seq_prob: float
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples is not None and self.num_samples < 1:
            raise DataError(f"`num_samples` must be at least 1, but is {self.num_samples}.")
        if self.epochs < 1:
            raise DataError(f"`epochs` must be at least 1, but is {self.epochs}.")

    @property
    def short_ratio(self) -> int:
        """The number of targets to each short one; 0 if none is short."""
        if self.short_seq_prob == 0:
            return 0
        # Half away from zero, as C rounds. From 2^32 on only the draw 0 is a multiple, whatever the ratio.
        return math.floor(min(1.0 / self.short_seq_prob, 2.0**32) + 0.5)

    def is_reached(self, rows: int, epoch: int) -> bool:
        """Whether `epoch` epochs, which gave `rows` rows, are enough."""
        return epoch >= self.epochs if self.num_samples is None else rows >= self.num_samples


@dataclass(frozen=True)
class DocumentCounts:
    """The number of documents that a map makes samples of, and of those that it leaves out, by reason.

    empty: without a sentence. single: of one sentence where two segments are wanted. long: of several
    sentences, one of which has more than LONGEST_SENTENCE tokens.
    """

    used: int
    empty: int
    single: int
    long: int

    @property
    def left_out(self) -> int:
        return self.empty + self.single + self.long

    @property
    def reasons(self) -> str:
        """The reasons for which documents are left out, with the number of documents for each."""
        listed = (
            (self.empty, "empty"),
            (self.single, "of one sentence"),
            (self.long, f"with a sentence of more than {LONGEST_SENTENCE} tokens"),
        )
        return ", ".join(f"{count} {reason}" for count, reason in listed if count)


def count_documents(lengths: np.ndarray, boundaries: np.ndarray, min_sentences: int) -> DocumentCounts:
    """Count the documents that a map uses and leaves out. lengths: int32 [S], for the whole dataset;
    boundaries: int64 [n + 1], the sentence that each document starts with, and the end of the last."""
    boundaries = np.asarray(boundaries)
    sentences = np.diff(boundaries)
    first, last = int(boundaries[0]), int(boundaries[-1])
    places = first + np.flatnonzero(np.asarray(lengths[first:last]) > LONGEST_SENTENCE)
    holders = np.unique(np.searchsorted(boundaries, places, side="right") - 1)
    long = int((sentences[holders] > 1).sum())
    empty, single = int((sentences == 0).sum()), int((sentences == 1).sum()) if min_sentences > 1 else 0
    return DocumentCounts(sentences.size - empty - single - long, empty, single, long)


def build_sample_map(lengths: np.ndarray, boundaries: np.ndarray, plan: MapPlan) -> np.ndarray:
    """Rows (first sentence, end, target length), shuffled: uint32 [samples, 3], or uint64 if there are more
    than 2^32 - 1 sentences. At least one document must be usable, see `count_documents`."""
    if NATIVE is None:
        return sample_map_reference(lengths, boundaries, plan)
    rows: np.ndarray = NATIVE.sentence_map(
        lengths,
        boundaries,
        -1 if plan.num_samples is None else plan.num_samples,
        plan.epochs,
        plan.target,
        plan.min_sentences,
        plan.short_ratio,
        plan.seed,
        LONGEST_SENTENCE,
    )
    return rows


def sample_map_reference(lengths: np.ndarray, boundaries: np.ndarray, plan: MapPlan) -> np.ndarray:
    """The algorithm of `build_sample_map`, in Python."""
    targets = _targets(plan)
    rows: list[tuple[int, int, int]] = []
    documents = list(zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True))
    epoch = 0
    while not plan.is_reached(len(rows), epoch):
        for first, end in documents:
            sizes = lengths[first:end].tolist()
            too_long = len(sizes) > 1 and max(sizes) > LONGEST_SENTENCE
            if len(sizes) >= plan.min_sentences and not too_long:
                rows += _packed(sizes, first, plan.min_sentences, targets)
        epoch += 1
    numbers = mersenne_64(plan.seed + 1)
    for i in range(len(rows) - 1, 0, -1):
        j = next(numbers) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    dtype = np.uint64 if len(lengths) > np.iinfo(np.uint32).max else np.uint32
    return np.array(rows, dtype=dtype).reshape(-1, 3)


def _packed(
    sizes: list[int], first: int, min_sentences: int, targets: Iterator[int]
) -> Iterator[tuple[int, int, int]]:
    """The rows of one document, whose sentences from number `first` have these sizes."""
    target, tokens, begin = next(targets), 0, first
    for place, size in enumerate(sizes, start=1):
        tokens += size
        left, taken = len(sizes) - place, first + place - begin
        # One sentence that is left over is no sample of two segments, so the sample before takes it in.
        if left == 0 or (tokens >= target and left > 1 and taken >= min_sentences):
            yield begin, first + place, target
            target, tokens, begin = next(targets), 0, first + place


def _targets(plan: MapPlan) -> Iterator[int]:
    """Target lengths without end. One draw decides both whether a target is short and how short."""
    random = np.random.RandomState(plan.seed % (1 << 32))
    while True:
        if plan.short_ratio == 0:
            yield plan.target
            continue
        for draw in random.randint(0, 1 << 32, _DRAWS, dtype=np.uint32).tolist():
            yield 2 + draw % (plan.target - 1) if draw % plan.short_ratio == 0 else plan.target
