"""The orders of documents and samples without arrays, for indexes that are too large to be shuffled in memory.

Each epoch has a permutation of its own (`shuffle.permuted`), which is computed for the places that are asked
for. A longer training goes on with the order of a shorter one. It is another order than Megatron's, whose
shuffle needs all numbers in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megazero.data.shuffle import permuted


@dataclass(frozen=True)
class ComputedOrder:
    """Numbers 0..size-1 in epochs, each permuted by itself; indexed by places like an array of int64.

    Epoch e ends before number ((e + 1) * per_epoch - extra) // unit, so that documents are units of 1, and
    samples units of some tokens that end `extra` tokens late.

    Attributes:
        key: determines the permutations, together with the epoch.
        epochs: the number of epochs.
        size: the numbers of all epochs.
        per_epoch, unit, extra: see above.
        ids: what the numbers of each epoch stand for; None for the numbers themselves.
    """

    key: str
    epochs: int
    size: int
    per_epoch: int
    unit: int = 1
    extra: int = 0
    ids: range | np.ndarray | None = None

    def __getitem__(self, places: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(places, slice):
            places = np.arange(*places.indices(self.size))
        places = np.asarray(places, dtype=np.int64)
        numbers, epochs = np.empty_like(places), self.epochs_of(places)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            first, end = self._border(epoch), self._border(epoch + 1)
            numbers[chosen] = first + permuted(places[chosen] - first, end - first, f"{self.key} {epoch}")
        if self.ids is None:
            return numbers
        numbers %= len(self.ids)
        return numbers + self.ids.start if isinstance(self.ids, range) else self.ids[numbers].astype(np.int64)

    def epochs_of(self, places: np.ndarray) -> np.ndarray:
        """The epoch of each place, int64 [n]."""
        epochs = ((places + 1) * self.unit + self.extra - 1) // self.per_epoch
        return np.minimum(epochs, self.epochs - 1)

    def _border(self, epoch: int) -> int:
        return max(0, (epoch * self.per_epoch - self.extra) // self.unit)
