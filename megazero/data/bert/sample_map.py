"""The sentences of each sample of a BERT dataset, in Megatron-Core's order.

The documents are walked in file order, epoch after epoch, until there are enough samples. Sentences of a
document are packed until they reach a target length; some targets are short, so that the model also sees
shorter samples (Devlin et al. 2019). The rows of all epochs are then shuffled together.

`sample_map_reference` is the algorithm; its compiled twin (csrc/data) is used if it is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megazero.data.index_check import ONE, blocks
from megazero.data.native import NATIVE
from megazero.errors import DataError

LONGEST_SENTENCE = 512  # tokens; a document of several sentences is left out if one is longer
_DRAWS = 4096  # random numbers that the reference draws at a time
# The 64-bit Mersenne Twister: words of its state, the distance of a twist, and its constants.
_WORDS, _TWIST_DISTANCE = 312, 156
_LOW, _HIGH = np.uint64(0x7FFFFFFF), np.uint64(0xFFFFFFFF80000000)
_TWIST = np.uint64(0xB5026F5AA96619E9)
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class MapPlan:
    """The parameters of a sample map.

    num_samples: the least number of samples, over as many epochs as that takes; None: exactly `epochs`
    epochs. target: tokens of a full sample, without special tokens; at least 2. min_sentences: 2 if a sample
    has two segments, else 1. short_seq_prob: share of the samples with a shorter target, realized as
    1 / round(1 / short_seq_prob), so that anything above 2/3 means every sample. seed: at least 0.
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
        """The number n such that one target in n is short; 0 if no target is short."""
        if self.short_seq_prob == 0:
            return 0
        # Round half away from zero, as C does. Draws are below 2^32: a larger ratio would change nothing.
        return math.floor(min(1.0 / self.short_seq_prob, 2.0**32) + 0.5)

    def is_reached(self, rows: int, epoch: int) -> bool:
        """Whether `rows` rows, of `epoch` epochs, are enough."""
        return epoch >= self.epochs if self.num_samples is None else rows >= self.num_samples


@dataclass(frozen=True)
class DocumentCounts:
    """How many documents a map uses, and how many it leaves out for which reason.

    empty: documents without a sentence. single: of one sentence where samples have two segments. long: of
    several sentences, one of them with more than LONGEST_SENTENCE tokens.
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
        """The numbers of documents left out, with the reasons, as text."""
        listed = (
            (self.empty, "empty"),
            (self.single, "of one sentence"),
            (self.long, f"with a sentence of more than {LONGEST_SENTENCE} tokens"),
        )
        return ", ".join(f"{count} {reason}" for count, reason in listed if count)


def count_documents(lengths: np.ndarray, boundaries: np.ndarray, min_sentences: int) -> DocumentCounts:
    """Count the documents that a map uses and leaves out.

    lengths: int32 [S], tokens of the sentences of the whole dataset; boundaries: int64 [n + 1], the first
    sentence of each document, then the end of the last document.
    """
    sentences = np.diff(boundaries)
    long = int(_has_long_sentence(lengths, boundaries).sum())
    empty, single = int((sentences == 0).sum()), int((sentences == 1).sum()) if min_sentences > 1 else 0
    return DocumentCounts(sentences.size - empty - single - long, empty, single, long)


def _has_long_sentence(lengths: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    """A mask of the documents of several sentences that are left out for a long one, bool [n]."""
    boundaries = np.asarray(boundaries)
    sentences = np.diff(boundaries)
    first, last = int(boundaries[0]), int(boundaries[-1])
    places = first + np.flatnonzero(np.asarray(lengths[first:last]) > LONGEST_SENTENCE)
    long = np.zeros(sentences.size, dtype=bool)
    long[np.searchsorted(boundaries, places, side="right") - 1] = True
    return long & (sentences > 1)


def build_sample_map(lengths: np.ndarray, boundaries: np.ndarray, plan: MapPlan) -> np.ndarray:
    """Build the shuffled rows (first sentence, end, target length), uint32 [samples, 3].

    The rows are uint64 if there are more than 2^32 - 1 sentences. Arguments as for `count_documents`, by
    which at least one document must be used.
    """
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
    """The reference of `build_sample_map`."""
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
    """The rows of one document, whose sentences from number `first` on have `sizes` tokens."""
    target, tokens, begin = next(targets), 0, first
    for place, size in enumerate(sizes, start=1):
        tokens += size
        left, taken = len(sizes) - place, first + place - begin
        # A single last sentence cannot make a sample of two segments, so it joins the sample before.
        if left == 0 or (tokens >= target and left > 1 and taken >= min_sentences):
            yield begin, first + place, target
            target, tokens, begin = next(targets), 0, first + place


def _targets(plan: MapPlan) -> Iterator[int]:
    """Yield target lengths without end; one draw decides both whether a target is short and how short."""
    random = np.random.RandomState(plan.seed % (1 << 32))
    while True:
        if plan.short_ratio == 0:
            yield plan.target
            continue
        for draw in random.randint(0, 1 << 32, _DRAWS, dtype=np.uint32).tolist():
            yield 2 + draw % (plan.target - 1) if draw % plan.short_ratio == 0 else plan.target


def mersenne_64(seed: int) -> Iterator[int]:
    """The numbers of the 64-bit Mersenne Twister (Nishimura 2000), std::mt19937_64, which numpy lacks."""
    state = np.empty(_WORDS, dtype=np.uint64)
    value = seed & _MASK
    for i in range(_WORDS):
        state[i] = value
        value = (6364136223846793005 * (value ^ (value >> 62)) + i + 1) & _MASK
    while True:
        _twist(state)
        yield from _tempered(state).tolist()


def _twist(state: np.ndarray) -> None:
    """Make the next block of words in place.

    A word needs the word `_TWIST_DISTANCE` further on, so each half is made at once, and the last word alone.
    """
    for begin, end, source in ((0, _TWIST_DISTANCE, _TWIST_DISTANCE), (_TWIST_DISTANCE, _WORDS - 1, 0)):
        mixed = (state[begin:end] & _HIGH) | (state[begin + 1 : end + 1] & _LOW)
        state[begin:end] = state[source : source + end - begin] ^ _twisted(mixed)
    last = (state[-1:] & _HIGH) | (state[:1] & _LOW)
    state[-1:] = state[_TWIST_DISTANCE - 1 : _TWIST_DISTANCE] ^ _twisted(last)


def _twisted(mixed: np.ndarray) -> np.ndarray:
    one = np.uint64(1)
    twisted: np.ndarray = (mixed >> one) ^ np.where(mixed & one, _TWIST, np.uint64(0))
    return twisted


def _tempered(state: np.ndarray) -> np.ndarray:
    x = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
    x = x ^ ((x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000))
    x = x ^ ((x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000))
    tempered: np.ndarray = x ^ (x >> np.uint64(43))
    return tempered


def sample_map_fault(
    rows: np.ndarray, lengths: np.ndarray, boundaries: np.ndarray, plan: MapPlan
) -> str | None:
    """Return a clause saying why `rows` from a cache cannot be a map of these documents; None if they can.

    In each epoch the rows of a used document must cover its sentences one after the other; other documents
    must have no rows. Arguments as for `build_sample_map`. Time and memory are linear in rows and sentences.
    """
    if rows.dtype.kind != "u" or rows.ndim != 2 or rows.shape[1] != 3:
        return f"rows must be unsigned integers [samples, 3], but are {rows.dtype} {list(rows.shape)}"
    if len(rows) < (plan.num_samples or 1):
        return f"rows must be at least {plan.num_samples or 1}, but are {len(rows)}"
    low, high = int(boundaries[0]), int(boundaries[-1])
    least = 2 if plan.short_ratio else plan.target
    begun, ended = (np.zeros(high - low + 1, dtype=np.int32) for _ in range(2))
    for block in blocks(len(rows)):
        firsts, ends, targets = (rows[block, column].astype(np.int64) for column in range(3))
        if int(firsts.min()) < low or int(ends.max()) > high or (ends <= firsts).any():
            return "rows name sentences that are not there"
        if int((ends - firsts).min()) < plan.min_sentences:
            return f"rows must have at least {plan.min_sentences} sentence(s), but one has fewer"
        if int(targets.min()) < least or int(targets.max()) > plan.target:
            return f"rows must have targets of {least}..{plan.target} tokens, but have others"
        np.add.at(begun, firsts - low, ONE)
        np.add.at(ended, ends - low, ONE)
    sentences = np.diff(boundaries)
    used = (sentences >= max(1, plan.min_sentences)) & ~_has_long_sentence(lengths, boundaries)
    starts = boundaries[:-1][used] - low
    epochs = int(begun[starts[0]])
    if plan.num_samples is None and epochs != plan.epochs:
        return f"rows must make {plan.epochs} epoch(s), but make {epochs}"
    # If as many rows begin with each document as cover each of its sentences, no row crosses its ends.
    sound = bool((begun[starts] == epochs).all())
    rows_over = np.cumsum(np.subtract(begun, ended, out=begun), dtype=np.int32)[:-1]
    wanted = np.repeat(np.where(used, np.int32(epochs), np.int32(0)), sentences)
    if not (sound and np.array_equal(rows_over, wanted)):
        return "rows must have each sentence once per epoch, but do not"
    return None
