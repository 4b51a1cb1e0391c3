"""From the sentences of a sample to its arrays, in Megatron-Core's order of draws.

A sample draws from a generator of its own, `numpy.random.RandomState(seed)`, so it is a function of its
sentences and its seed. `sample_reference` is the algorithm; its compiled twin (csrc/data), which reproduces
numpy's generator bit for bit, is used if it is built.

Two things differ from Megatron-Core, on purpose. Padding is known from `lengths`, not from the ids after
masking, as a random replacement or the text itself may contain the id of [PAD]. And replacements are drawn
from ids in ascending order, so that they are the same in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megazero.data.bert.masking import mask_tokens, run_chances
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.native import NATIVE

SPECIAL_TOKENS = 3  # [CLS] and two [SEP]
_ARRAYS = ("tokens", "token_types", "labels", "loss_mask", "lengths", "is_random", "truncated")


@dataclass(frozen=True)
class SampleRecipe:
    """How sentences become a sample.

    sequence_length: T, to which samples are padded; mask_prob: the share of tokens to predict; two_segments:
    whether samples have a segment B.
    """

    words: WordPieces
    sequence_length: int
    mask_prob: float
    two_segments: bool


@dataclass(frozen=True)
class SentenceStore:
    """Token ids of S sentences. lengths: int32 [S], in tokens; offsets: int64 [S], in bytes of `tokens`."""

    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray

    def sentence(self, number: int) -> list[int]:
        begin = int(self.offsets[number]) // self.tokens.itemsize
        ids: list[int] = self.tokens[begin : begin + int(self.lengths[number])].tolist()
        return ids


def make_samples(
    store: SentenceStore, rows: np.ndarray, seeds: np.ndarray, recipe: SampleRecipe
) -> tuple[dict[str, np.ndarray], int, int]:
    """Make the arrays of `BERTDataset.batch`; also return the lowest and highest id before masking.

    rows: int64 [b, 3], of a sample map; seeds: int64 [b], below 2^32. An id outside the vocabulary counts as
    a whole word, so that the caller can name the sample that has it.
    """
    if NATIVE is None:
        return _make_samples_reference(store, rows, seeds, recipe)
    words, bounds = recipe.words, np.cumsum(run_chances())  # RandomState.choice compares with these
    *arrays, lowest, highest = NATIVE.masked_samples(
        (store.tokens, store.lengths, store.offsets),
        rows,
        seeds,
        (words.specials, words.continues, words.replacements),
        recipe.sequence_length,
        recipe.mask_prob,
        bounds / bounds[-1],
        recipe.two_segments,
    )
    return dict(zip(_ARRAYS, arrays, strict=True)), lowest, highest


def _make_samples_reference(
    store: SentenceStore, rows: np.ndarray, seeds: np.ndarray, recipe: SampleRecipe
) -> tuple[dict[str, np.ndarray], int, int]:
    shape = (len(rows), recipe.sequence_length)
    batch: dict[str, np.ndarray] = {
        "tokens": np.full(shape, recipe.words.pad, dtype=np.int64),
        "token_types": np.zeros(shape, dtype=np.int64),
        "labels": np.full(shape, -1, dtype=np.int64),
        "loss_mask": np.zeros(shape, dtype=np.float32),
        **{name: np.zeros(len(rows), dtype=np.int64) for name in ("lengths", "is_random", "truncated")},
    }
    lowest, highest = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    for k, (first, end, target) in enumerate(rows.tolist()):
        sentences = [store.sentence(number) for number in range(first, end)]
        sample = sample_reference(sentences, target, np.random.RandomState(int(seeds[k])), recipe)
        lowest, highest = min(lowest, *sample.tokens), max(highest, *sample.tokens)
        length = len(sample.tokens)
        batch["tokens"][k, :length] = sample.masked
        batch["token_types"][k, sample.begin_b : length] = 1
        batch["labels"][k, sample.places] = [sample.tokens[place] for place in sample.places]
        batch["loss_mask"][k, sample.places] = 1.0
        batch["lengths"][k] = length
        batch["is_random"][k] = sample.swapped
        batch["truncated"][k] = sample.truncated
    return batch, lowest, highest


@dataclass(frozen=True)
class MaskedSample:
    """One sample.

    tokens: before masking; masked: after masking; places: the positions to predict; begin_b: where segment B
    begins, the end of the sample if there is no segment B.
    """

    tokens: list[int]
    masked: list[int]
    places: list[int]
    begin_b: int
    swapped: bool
    truncated: bool


def sample_reference(
    sentences: Sequence[list[int]], target: int, random: np.random.RandomState, recipe: SampleRecipe
) -> MaskedSample:
    """Make a sample of at most `target` tokens of text and three special tokens."""
    words = recipe.words
    a, b, swapped = _segments(sentences, recipe.two_segments, random)
    truncated = len(a) + len(b) > target
    a, b = _shortened(a, b, target, random)
    tokens = [words.cls, *a, words.sep, *b, *([words.sep] if b else [])]
    masked, places = mask_tokens(tokens, target, recipe.mask_prob, words, random)
    return MaskedSample(tokens, masked, places, len(a) + 2, swapped, truncated)


def _segments(
    sentences: Sequence[list[int]], two: bool, random: np.random.RandomState
) -> tuple[list[int], list[int], bool]:
    """Segments A and B, and whether they are swapped, as half of the samples are.

    That is the label of sentence order prediction (Lan et al. 2020), which replaces next sentence prediction
    here and in Megatron.
    """
    pivot = len(sentences)
    if two:
        pivot = int(random.randint(1, len(sentences))) if len(sentences) > 2 else 1
    a = [token for sentence in sentences[:pivot] for token in sentence]
    b = [token for sentence in sentences[pivot:] for token in sentence]
    swapped = two and bool(random.random_sample() < 0.5)
    return (b, a, True) if swapped else (a, b, False)


def _shortened(
    a: list[int], b: list[int], target: int, random: np.random.RandomState
) -> tuple[list[int], list[int]]:
    """Drop tokens one by one, from a random end of the longer segment, until both segments fit `target`."""
    spans = [[0, len(a)], [0, len(b)]]
    sizes = [len(a), len(b)]
    while sum(sizes) > target:
        longer = 0 if sizes[0] > sizes[1] else 1
        if random.random_sample() < 0.5:
            spans[longer][0] += 1
        else:
            spans[longer][1] -= 1
        sizes[longer] -= 1
    return a[slice(*spans[0])], b[slice(*spans[1])]
