"""Random tokens for trying out a run without data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megazero.data.blended import SampleDataset
from megazero.data.gpt_dataset import GPTSettings, finish_batch
from megazero.data.range_checks import check_sample_numbers
from megazero.errors import DataError


class MockDataset(SampleDataset):
    """Random samples: sample i is a function of (seed, name, i) alone."""

    notes = ()

    def __init__(self, num_samples: int, seed: int, name: str):
        self.name = name
        self._size = num_samples
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "little")

    def __len__(self) -> int:
        return self._size

    def _random(self, index: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self._key, index]))


class MockGPTDataset(MockDataset):
    """Random samples with the arrays of `GPTDataset`. Raises DataError without a vocabulary size."""

    padding_share = 0.0

    def __init__(self, num_samples: int, settings: GPTSettings, name: str = "train"):
        if settings.vocab_size is None:
            raise DataError("`vocab_size` must be given for mock data, but is None; set it.")
        super().__init__(num_samples, settings.seed, name)
        self.settings = settings

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples `indices` stacked, arrays [b, T]. IndexError past the end."""
        length = self.settings.sequence_length + 1  # one token more, for the last label
        rows = [
            self._random(index).integers(0, self.settings.vocab_size, length)
            for index in check_sample_numbers(indices, len(self), "mock data").tolist()
        ]
        text = np.array(rows, dtype=np.int64).reshape(-1, length)
        return finish_batch(text[:, :-1].copy(), text[:, 1:].copy(), self.settings)

    @property
    def description(self) -> dict[str, object]:
        return {
            "kind": "mock",
            "name": self.name,
            "key": self._key,
            "samples": self._size,
            "sequence_length": self.settings.sequence_length,
            "vocab_size": self.settings.vocab_size,
        }
