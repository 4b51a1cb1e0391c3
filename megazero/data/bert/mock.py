"""Random sentences for trying out a run of BERT without data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megazero.data.bert.dataset import BERTSettings
from megazero.data.bert.sample import SentenceStore, make_samples
from megazero.data.mock import MockDataset
from megazero.data.range_checks import check_sample_numbers

_SENTENCE = (5, 41)  # lengths of sentences in tokens: from 5, below 41


class MockBERTDataset(MockDataset):
    """Random sentences with the arrays of `BERTDataset`; as there, some samples have a shorter target.

    Raises DataError if the vocabulary holds nothing but special tokens.
    """

    def __init__(self, num_samples: int, settings: BERTSettings, name: str = "train"):
        super().__init__(num_samples, settings.seed, name)
        self.settings = settings
        self._plain = settings.words.plain

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples `indices` stacked, arrays [b, T] and [b]. IndexError past the end."""
        numbers = check_sample_numbers(indices, len(self), "mock data")
        texts, sizes, rows, first = [], [], [], 0
        for index in numbers.tolist():
            random = self._random(index)
            target, lengths = self._shape(random)
            texts.append(self._plain[random.integers(0, self._plain.size, int(lengths.sum()))])
            sizes.append(lengths)
            rows.append((first, first + lengths.size, target))
            first += lengths.size
        tokens = np.concatenate([np.empty(0, dtype=np.int64), *texts])
        lengths = np.concatenate([np.empty(0, dtype=np.int32), *sizes])
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * tokens.itemsize
        seeds = (numbers + self._key % (1 << 32)) % (1 << 32)
        sample_map = np.array(rows, dtype=np.int64).reshape(-1, 3)
        store = SentenceStore(tokens, lengths, offsets)
        return make_samples(store, sample_map, seeds, self.settings.recipe)[0]

    def _shape(self, random: np.random.Generator) -> tuple[int, np.ndarray]:
        """The target length of a sample, and the lengths int32 [n >= 2] of sentences that reach it."""
        target = self.settings.target
        if random.random() < self.settings.short_seq_prob:
            target = int(random.integers(2, target + 1))
        lengths = random.integers(*_SENTENCE, size=2 + target // _SENTENCE[0], dtype=np.int32)
        reached = int(np.searchsorted(np.cumsum(lengths), target))
        return target, lengths[: max(2, reached + 1)]

    @property
    def padding_share(self) -> float:
        """An estimate of the share of positions that hold padding: short targets are half full on average."""
        settings = self.settings
        return settings.short_seq_prob * settings.target / 2 / settings.sequence_length

    @property
    def description(self) -> dict[str, object]:
        return {
            "kind": "mock-bert",
            "name": self.name,
            "key": self._key,
            "samples": self._size,
            "short_seq_prob": self.settings.short_seq_prob,
            **self.settings.masking,
        }
