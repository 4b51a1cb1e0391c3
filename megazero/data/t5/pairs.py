"""Pairs of texts for fine-tuning: the encoder's input and the decoder's answer, from published files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megazero.config.tasks import Task
from megazero.config.tree.data import DataConfig
from megazero.data.blended import SampleDataset
from megazero.data.labelled.files import read_labelled
from megazero.data.range_checks import check_sample_numbers
from megazero.data.shuffle import cyclic_sample
from megazero.data.splits import SPLIT_NAMES, SplitReading, split_ranges, warn_of_empty
from megazero.data.t5.dataset import T5Settings
from megazero.data.t5.spans import Arrays, PairShape
from megazero.data.t5.vocabulary import SpanVocabulary
from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import DataError

Pair = tuple[list[int], list[int]]
"""The token ids of the encoder's text and of the decoder's."""


def read_pairs(path: str, columns: tuple[str, str], tokenizer: Tokenizer, end: int) -> list[Pair]:
    """Read the pairs of a JSON or TSV file, or of a folder of such files; both texts end with the id `end`.

    Raises DataError if the file is missing, unreadable or empty, or lacks a column.
    """
    texts = [sample.texts for sample in read_labelled(path, Task(columns), labels_needed=False).samples]
    sources, targets = ([pair[side] for pair in texts] for side in (0, 1))
    sides = [[[*row.tolist(), end] for row in tokenizer.encode_batch(x).rows()] for x in (sources, targets)]
    return list(zip(*sides, strict=True))


def pair_datasets(
    data: DataConfig, settings: T5Settings, tokenizer: Tokenizer | None, sizes: tuple[int | None, ...]
) -> tuple[PairDataset | None, PairDataset | None, PairDataset | None]:
    """Make (train, valid, test) from files of pairs; only the training pairs are shuffled, in every epoch.

    A split of size 0 is None. A split that is wanted but gets no pairs is None too, with a warning.

    Raises:
        DataError: a file is missing or holds no pairs, or there is no tokenizer.
    """
    columns = data.t5_columns
    assert columns is not None, "called for files of pairs"
    if tokenizer is None:
        raise DataError("`--tokenizer-type` must be given to read texts, but is not; name the tokenizer.")
    end, own_paths = (
        settings.vocabulary.end,
        (data.train_data_path, data.valid_data_path, data.test_data_path),
    )

    def pairs_of(paths: tuple[str, ...]) -> list[Pair]:
        return [pair for path in paths for pair in read_pairs(path, columns, tokenizer, end)]

    if any(own_paths):
        splits = [pairs_of(paths) for paths in own_paths]
    else:
        whole = pairs_of(data.data_path)
        ranges = split_ranges(data.split, len(whole), SplitReading.MEGATRON_CORE)
        splits = [whole[part.start : part.stop] for part in ranges]
        for number, (pairs, size) in enumerate(zip(splits, sizes, strict=True)):
            if not pairs and size != 0:
                warn_of_empty(data.split, number, f"{len(whole)} pairs")
    train, valid, test = (
        PairDataset(pairs, size, settings.shape, settings.vocabulary, None if number else settings.seed, name)
        if pairs and size != 0
        else None
        for number, (pairs, size, name) in enumerate(zip(splits, sizes, SPLIT_NAMES, strict=True))
    )
    return train, valid, test


class PairDataset(SampleDataset):
    """Pairs of texts, epoch after epoch in the order of a cyclic training.

    Args:
        pairs: at least one pair; both texts end with the token that ends a text.
        count: the number of samples; None for one epoch.
        shape: the shape of the arrays.
        vocabulary: gives the id with which the decoder starts.
        seed: determines the order; None keeps the pairs in file order.
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

    def batch(self, indices: Sequence[int] | np.ndarray) -> Arrays:
        """The samples `indices` stacked, see `PairShape.arrays`. IndexError past the end."""
        numbers = check_sample_numbers(indices, len(self), f"the {self.name} split").tolist()
        count = len(self.pairs)
        if self.seed is None:
            chosen = [self.pairs[number % count] for number in numbers]
        else:
            chosen = [self.pairs[cyclic_sample(number, count, self.seed)] for number in numbers]
        return self.shape.arrays(chosen, self.vocabulary.start)

    @property
    def description(self) -> dict[str, object]:
        """Everything that the samples and their order depend on, as JSON."""
        digest = hashlib.blake2b(repr(self.pairs).encode(), digest_size=16).hexdigest()
        shape = [self.shape.encoder, self.shape.decoder, self.vocabulary.start]
        return {"kind": "pairs", "pairs": digest, "shape": shape, "seed": self.seed}

    @property
    def padding_share(self) -> float:
        """Share of the encoder's and decoder's positions that hold no token."""
        positions = len(self.pairs) * (self.shape.encoder + self.shape.decoder)
        tokens = (min(len(s), self.shape.encoder) + min(len(t), self.shape.decoder) for s, t in self.pairs)
        return 1.0 - sum(tokens) / positions

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence with the number of truncated pairs, if there are any."""
        long = sum(len(s) > self.shape.encoder or len(t) > self.shape.decoder for s, t in self.pairs)
        return (f"{long} of {len(self.pairs)} pairs of the {self.name} split are cut.",) if long else ()
