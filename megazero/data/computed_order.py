"""Orders of documents and samples without arrays, for indexes that are too large to be shuffled in memory.

Each epoch has a permutation of its own (`shuffle.permuted`), which is computed for the places that are asked
for. A longer training goes on with the order of a shorter one. It is not Megatron's order, whose shuffle
needs all numbers in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megazero.data.shuffle import permuted


@dataclass(frozen=True)
class ComputedOrder:
    """Numbers 0..size-1 in epochs, each permuted by itself; indexed by places like an array of int64.

    Epoch e ends before number ((e + 1) * per_epoch - extra) // unit: documents are units of 1, samples of
    some tokens. key: determines the permutations. ids: what the numbers of each epoch stand for.
    """

    key: str
    epochs: int
    size: int
    per_epoch: int
    unit: int = 1
    extra: int = 0
    ids: range | np.ndarray | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, places: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(places, slice):
            places = np.arange(*places.indices(self.size))
        places = np.asarray(places, dtype=np.int64)
        numbers = np.empty_like(places)
        epochs = ((places + 1) * self.unit + self.extra - 1) // self.per_epoch
        epochs = np.minimum(epochs, self.epochs - 1)
        for epoch in np.unique(epochs).tolist():
            inside, first = epochs == epoch, self._border(epoch)
            count = self._border(epoch + 1) - first
            numbers[inside] = first + permuted(places[inside] - first, count, f"{self.key} {epoch}")
        if self.ids is None:
            return numbers
        numbers %= len(self.ids)
        chosen: np.ndarray = numbers + self.ids.start if isinstance(self.ids, range) else self.ids[numbers]
        return chosen

    def _border(self, epoch: int) -> int:
        return max(0, (epoch * self.per_epoch - self.extra) // self.unit)


def computed_orders(
    seed: int, epochs: int, ids: range | np.ndarray, samples: tuple[int, int, int, int]
) -> tuple[ComputedOrder, ComputedOrder]:
    """The order of the documents `ids` over some epochs, and that of their samples.

    samples: their number, tokens in an epoch, tokens in a sample, and tokens that the last one needs beside.
    """
    number, per_epoch, unit, extra = samples
    return (
        ComputedOrder(f"documents {seed}", epochs, epochs * len(ids), len(ids), ids=ids),
        ComputedOrder(f"samples {seed}", epochs, number, per_epoch, unit, extra),
    )
