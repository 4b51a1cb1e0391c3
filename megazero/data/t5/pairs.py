"""Pairs of texts from files as they are published: what the encoder is given, and the decoder's answer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megazero.config.tasks import Task
from megazero.data.blended import SampleDataset
from megazero.data.labelled.files import read_labelled
from megazero.data.sample_numbers import sample_numbers
from megazero.data.shuffle import cyclic_sample
from megazero.data.t5.spans import Arrays, PairShape
from megazero.data.t5.vocabulary import SpanVocabulary
from megazero.data.tokenizers.base import Tokenizer

Pair = tuple[list[int], list[int]]


def read_pairs(path: str, columns: tuple[str, str], tokenizer: Tokenizer, end: int) -> list[Pair]:
    """The pairs in a file of JSON objects or of TSV, or in a folder of these, as ids that end with `end`.

    Raises:
        DataError: the file is missing, unreadable or empty, or lacks a column.
    """
    texts = [sample.texts for sample in read_labelled(path, Task(columns), labels_needed=False).samples]
    sources, targets = ([pair[side] for pair in texts] for side in (0, 1))
    sides = [[[*row.tolist(), end] for row in tokenizer.encode_batch(x).rows()] for x in (sources, targets)]
    return list(zip(*sides, strict=True))


class PairDataset(SampleDataset):
    """Pairs of texts, again and again in the order of a cyclic training.

    Args:
        pairs: the ids of both texts of each pair, at least one, with the token that ends them.
        count: the number of samples; None for one epoch.
        shape: the shape of the arrays.
        vocabulary: the ids.
        seed: determines the order; None leaves the pairs in theirs.
        name: the split's name.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        count: int | None,
        shape: PairShape,
        vocabulary: SpanVocabulary,
        seed: int | None,
        name: str = "train",
    ):
        self.pairs, self.shape, self.vocabulary, self.seed, self.name = pairs, shape, vocabulary, seed, name
        self._count = len(pairs) if count is None else count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Arrays:
        return {key: array[0] for key, array in self.batch([index]).items()}

    def batch(self, indices: Sequence[int] | np.ndarray) -> Arrays:
        """The samples `indices`, as `PairShape.arrays` gives them. IndexError past the end."""
        numbers = sample_numbers(indices, len(self), f"the {self.name} split").tolist()
        count = len(self.pairs)
        if self.seed is None:
            chosen = [self.pairs[number % count] for number in numbers]
        else:
            chosen = [self.pairs[cyclic_sample(number, count, self.seed)] for number in numbers]
        return self.shape.arrays(chosen, self.vocabulary.start)

    @property
    def description(self) -> dict[str, object]:
        """Everything that the order and content of the samples depend on, as JSON."""
        digest = hashlib.blake2b(repr(self.pairs).encode(), digest_size=16).hexdigest()
        shape = [self.shape.encoder, self.shape.decoder, self.vocabulary.start]
        return {"kind": "pairs", "pairs": digest, "shape": shape, "seed": self.seed}

    @property
    def padding_share(self) -> float:
        """Share of the positions of both texts that hold no token."""
        room = len(self.pairs) * (self.shape.encoder + self.shape.decoder)
        held = (min(len(s), self.shape.encoder) + min(len(t), self.shape.decoder) for s, t in self.pairs)
        return 1.0 - sum(held) / room

    @property
    def notes(self) -> tuple[str, ...]:
        """The number of pairs that are cut."""
        long = sum(len(s) > self.shape.encoder or len(t) > self.shape.decoder for s, t in self.pairs)
        return (f"{long} of {len(self.pairs)} pairs of the {self.name} split are cut.",) if long else ()
