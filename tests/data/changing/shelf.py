"""Sources without files, whose samples say what they are, and a changing blend's rule in plain Python."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from megazero.data.blended import SampleDataset, parse_blend
from megazero.data.changing.history import Share


class Numbers(SampleDataset):
    """Samples of a source: each has the source, the key of the order, and its own number."""

    padding_share = 0.0
    notes = ()

    def __init__(self, path: str, samples: int, key: str | None):
        self.name, self._samples = path, samples
        self.part = 0 if key is None else int(key.split()[-1])

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        rows = [[int(self.name[1:]), self.part, number] for number in indices]
        return {"sample": np.array(rows, dtype=np.int64).reshape(-1, 3)}

    @property
    def description(self) -> dict[str, object]:
        return {"path": self.name, "part": self.part, "samples": self._samples}


class Shelf:
    """Sources s0, s1, ... of the given numbers of samples per epoch; `made` is what was built of them."""

    def __init__(self, epochs: Mapping[str, int]):
        self.epochs = epochs
        self.made: list[tuple[str, str | None]] = []

    def make(self, path: str, samples: int, key: str | None) -> Numbers:
        self.made.append((path, key))
        epoch = self.epochs[path]
        return Numbers(path, -(-samples // epoch) * epoch, key)

    def shares(self, words: Sequence[str], known: Collection[str] = ()) -> tuple[Share, ...]:
        pairs = parse_blend(words, must_exist=False)
        return tuple(Share(source=path, path=path, weight=weight or 0.0) for weight, path in pairs)


def by_the_rule(edits: Sequence[tuple[int, Mapping[str, float]]], count: int) -> list[tuple[str, int]]:
    """(source, number of its sample) of the first `count` samples, edits being (start, weights)."""
    order: list[tuple[str, int]] = []
    given: dict[str, int] = {}
    for (start, weights), end in zip(edits, [*(s for s, _ in edits[1:]), count], strict=True):
        names = list(weights)
        shares = np.array([weights[name] for name in names])
        shares = shares / shares.sum()
        shares = shares / shares.sum()
        shares = shares / shares.sum()
        taken = np.zeros(len(names))
        for i in range(end - start):
            chosen = int(np.argmax(shares * max(i, 1) - taken))
            taken[chosen] += 1
            name = names[chosen]
            order.append((name, given.get(name, 0)))
            given[name] = given.get(name, 0) + 1
    return order
