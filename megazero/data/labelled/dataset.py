"""Encoded samples in memory, and the order of samples in the epochs of a training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megazero.data.blended import SampleDataset
from megazero.data.range_checks import check_sample_numbers
from megazero.data.shuffle import cyclic_sample

UNKNOWN_LABEL = -1
"""The label of a sample whose label is unknown, which counts neither in losses nor in scores."""


class EpochSamples(Protocol):
    """The samples of one epoch."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]: ...  # -1: one that does not count

    @property
    def arrays(self) -> tuple[np.ndarray, ...]: ...  # everything that the samples depend on

    @property
    def padding_share(self) -> float: ...  # of the positions of a sample, those without a token


@dataclass(frozen=True)
class LabelledSamples(EpochSamples):
    """`n` encoded samples; a sample has one row of ids for each choice, or a single row.

    Attributes:
        ids: the ids of all rows, concatenated.
        offsets: int64 [n x choices + 1], where each row begins in `ids`.
        firsts: int64 [n x choices], the number of ids in the first text of each row.
        labels: int64 [n].
        choices: the number of rows of a sample.
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

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Everything that the samples depend on."""
        return self.ids, self.offsets, self.firsts, self.labels

    @property
    def padding_share(self) -> float:
        """Share of the positions that hold no token."""
        positions = len(self) * self.choices * self.length
        return 1.0 - len(self.ids) / positions if positions else 0.0

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The samples `indices`, arrays of int64.

        `tokens` and `token_types` are [b, choices, T], `lengths` [b, choices] and `labels` [b]. The index -1
        gives a sample of one token with an unknown label.
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
    """The samples of several epochs, each padded to whole global batches with samples that do not count.

    So every epoch has each sample once, whatever the batch size and the ranks, and the loss of the last step
    is the mean over its real samples. The order of an epoch is a function of (seed, epoch).

    Args:
        samples: the samples of one epoch.
        batch_size: samples in a global batch.
        epochs: the number of epochs.
        seed: determines the orders; None keeps the samples in file order.
        name: the split's name.
    """

    def __init__(
        self,
        samples: EpochSamples,
        batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        name: str = "train",
    ):
        self.samples, self.name = samples, name
        self.steps = -(-len(samples) // batch_size)
        self._size = self.steps * batch_size
        self._epochs, self._seed = epochs, seed

    def __len__(self) -> int:
        return self._epochs * self._size

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples at positions `indices`, see `LabelledSamples.batch`. IndexError past the end."""
        positions = check_sample_numbers(indices, len(self), f"the {self.name} split")
        return self.samples.batch([self._sample(position) for position in positions.tolist()])

    @property
    def description(self) -> dict[str, object]:
        """Everything that the samples and their order depend on, as JSON."""
        return {
            "kind": "labelled",
            "samples": digest_of(self.samples),
            "epoch": self._size,
            "epochs": self._epochs,
            "seed": self._seed,
        }

    @property
    def padding_share(self) -> float:
        """Share of the positions of real samples that hold no token."""
        return self.samples.padding_share

    @property
    def notes(self) -> tuple[str, ...]:
        """No notes: `train/finetuning` reports what was left out of the files."""
        return ()

    def _sample(self, position: int) -> int:
        epoch, place = divmod(position, self._size)
        if place >= len(self.samples):
            return -1
        if self._seed is None:
            return place
        return cyclic_sample(epoch * len(self.samples) + place, len(self.samples), self._seed)


def digest_of(samples: EpochSamples) -> str:
    """A digest of all samples of an epoch."""
    digest = hashlib.blake2b(digest_size=16)
    for array in samples.arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
