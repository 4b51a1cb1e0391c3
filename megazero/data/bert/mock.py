"""Random sentences for trying out a run of BERT without data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megazero.data.bert.dataset import BERTSettings
from megazero.data.bert.sample import SentenceStore, make_samples
from megazero.data.blended import SampleDataset

_SENTENCE = (5, 41)  # tokens, from and below


class MockBERTDataset(SampleDataset):
    """Samples of random sentences: sample i is a function of (seed, name, i) alone.

    Items are like `BERTDataset`'s; as there, some are shorter than the full length. Raises DataError if the
    vocabulary holds nothing but special tokens.
    """

    def __init__(self, num_samples: int, settings: BERTSettings, name: str = "train"):
        self.settings = settings
        self.name = name
        self._size = num_samples
        self._plain = settings.words.plain
        digest = hashlib.blake2b(f"{settings.seed} {name}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "little")

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples `indices` stacked, arrays [b, T] and [b]. IndexError past the end."""
        texts, sizes, rows, first = [], [], [], 0
        for index in np.asarray(indices, dtype=np.int64).tolist():
            if not 0 <= index < self._size:
                raise IndexError(f"`index` must be in 0..{self._size - 1} of mock data, but is {index}.")
            random = np.random.Generator(np.random.Philox(key=[self._key, index]))
            target, lengths = self._shape(random)
            texts.append(self._plain[random.integers(0, self._plain.size, int(lengths.sum()))])
            sizes.append(lengths)
            rows.append((first, first + lengths.size, target))
            first += lengths.size
        tokens = np.concatenate([np.empty(0, dtype=np.int64), *texts])
        lengths = np.concatenate([np.empty(0, dtype=np.int32), *sizes])
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * tokens.itemsize
        seeds = (np.asarray(indices, dtype=np.int64) + self._key % (1 << 32)) % (1 << 32)
        plan = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return make_samples(SentenceStore(tokens, lengths, offsets), plan, seeds, self.settings.recipe)[0]

    def _shape(self, random: np.random.Generator) -> tuple[int, np.ndarray]:
        """A sample's target length, and the lengths of at least two sentences that reach it, int32 [n]."""
        target = self.settings.target
        if random.random() < self.settings.short_seq_prob:
            target = int(random.integers(2, target + 1))
        lengths = random.integers(*_SENTENCE, size=2 + target // _SENTENCE[0], dtype=np.int32)
        reached = int(np.searchsorted(np.cumsum(lengths), target))
        return target, lengths[: max(2, reached + 1)]

    @property
    def padding_share(self) -> float:
        """About the share of the positions that hold padding: short targets are half of the full one."""
        settings = self.settings
        return settings.short_seq_prob * settings.target / 2 / settings.sequence_length

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

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
