"""Encoded samples in memory, and the order in which epochs bring them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megazero.data.blended import SampleDataset
from megazero.data.sample_numbers import sample_numbers
from megazero.data.shuffle import cyclic_sample

UNKNOWN_LABEL = -1
"""In place of a label's number where it is not known; such a sample does not count."""


@dataclass(frozen=True)
class LabelledSamples:
    """`n` samples in rows of ids, one for each choice.

    Attributes:
        ids: the ids of all rows, one after the other.
        offsets: int64 [n x choices + 1], where each row begins in `ids`.
        firsts: int64 [n x choices], how many ids of a row belong to its first text.
        labels: int64 [n].
        choices: rows of a sample.
        length: T, the width of the arrays of `batch`.
    """

    ids: np.ndarray
    offsets: np.ndarray
    firsts: np.ndarray
    labels: np.ndarray
    choices: int
    length: int

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Arrays of some samples: `tokens` and `token_types` [b, choices, T], `lengths` [b, choices] and
        `labels` [b], all int64. The index -1 gives a sample of one token without a label.
        """
        shape = (len(indices), self.choices)
        tokens, types = (np.zeros((*shape, self.length), dtype=np.int64) for _ in range(2))
        lengths = np.ones(shape, dtype=np.int64)
        labels = np.full(len(indices), UNKNOWN_LABEL, dtype=np.int64)
        for i, index in enumerate(indices):
            if index < 0:
                continue
            labels[i] = self.labels[index]
            for choice in range(self.choices):
                row = index * self.choices + choice
                ids = self.ids[self.offsets[row] : self.offsets[row + 1]]
                lengths[i, choice] = len(ids)
                tokens[i, choice, : len(ids)] = ids
                types[i, choice, self.firsts[row] : len(ids)] = 1
        return {"tokens": tokens, "token_types": types, "lengths": lengths, "labels": labels}


class EpochOrder(SampleDataset):
    """The samples of several epochs, each rounded up to whole global batches by samples that do not count.

    So every epoch brings each sample once, whatever the batch size and the ranks, and its last step, which
    may be short, is the mean over what it really holds. The order of an epoch is a function of (seed, epoch).

    Args:
        samples: what there is.
        batch_size: samples in a global batch.
        epochs: how many epochs there are.
        seed: determines their orders; None leaves the samples in theirs.
        name: the split's name.
    """

    def __init__(
        self,
        samples: LabelledSamples,
        batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        name: str = "train",
    ):
        self.samples = samples
        self.name = name
        self.steps = -(-len(samples) // batch_size)
        self._size = self.steps * batch_size
        self._epochs = epochs
        self._seed = seed

    def __len__(self) -> int:
        return self._epochs * self._size

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples at these positions, as `LabelledSamples.batch` gives them. IndexError past the end."""
        positions = sample_numbers(indices, len(self), f"the {self.name} split")
        return self.samples.batch([self._sample(position) for position in positions.tolist()])

    @property
    def description(self) -> dict[str, object]:
        """Everything that the order and content of the samples depend on, as JSON."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.samples.ids, self.samples.offsets, self.samples.firsts, self.samples.labels):
            digest.update(np.ascontiguousarray(array).data)
        return {
            "kind": "labelled",
            "samples": digest.hexdigest(),
            "epoch": self._size,
            "epochs": self._epochs,
            "seed": self._seed,
        }

    @property
    def padding_share(self) -> float:
        """Share of the positions that hold no token, those of samples that do not count left out."""
        positions = len(self.samples) * self.samples.choices * self.samples.length
        return 1.0 - len(self.samples.ids) / positions if positions else 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """No notes: `train/finetuning` says what was left out of the files."""
        return ()

    def _sample(self, position: int) -> int:
        epoch, place = divmod(position, self._size)
        if place >= len(self.samples):
            return -1
        if self._seed is None:
            return place
        return cyclic_sample(epoch * len(self.samples) + place, len(self.samples), self._seed)
