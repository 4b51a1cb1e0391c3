"""Random texts for trying out a run of T5 without data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megazero.data.bert.mock import MockBERTDataset
from megazero.data.sample_numbers import sample_numbers
from megazero.data.t5.dataset import T5Settings
from megazero.data.t5.spans import Arrays


class MockT5Dataset(MockBERTDataset):
    """Samples of random texts: sample i is a function of (seed, name, i) alone."""

    settings: T5Settings

    def batch(self, indices: Sequence[int] | np.ndarray) -> Arrays:
        """The samples `indices` stacked. IndexError past the end."""
        plain, texts, seeds = self.settings.vocabulary.plain, [], []
        for index in sample_numbers(indices, len(self), "mock data").tolist():
            random = np.random.Generator(np.random.Philox(key=[self._key, index]))
            target, _ = self._shape(random)
            texts.append((plain[random.integers(0, plain.size, target)].tolist(), target))
            seeds.append((index + self._key) % (1 << 32))
        return self.settings.samples(texts, seeds)
