"""The pairs of an epoch as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megazero.data.labelled.dataset import EpochSamples
from megazero.data.preferences.pairs import Pairs


@dataclass(frozen=True)
class PairSamples(EpochSamples):
    """Pairs as samples, each of two rows.

    Attributes:
        pairs: the pairs.
        length: T, the width of the arrays of `batch`.
        reference: float32 [n, 2], the log-probability of each answer by the reference model; None without.
    """

    pairs: Pairs
    length: int
    reference: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Everything that the samples depend on, except the reference."""
        pairs = self.pairs
        return pairs.ids, pairs.offsets, pairs.answers, pairs.margins

    @property
    def padding_share(self) -> float:
        """Share of the positions that hold no token."""
        return 1.0 - len(self.pairs.ids) / (2 * len(self) * self.length)

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The pairs `indices`, chosen answers before rejected ones.

        `tokens` are int64 [b, 2, T], `lengths` and `answers` int64 [b, 2], `margins` float32 [b], and
        `reference`, if there is one, float32 [b, 2]. The index -1 gives a pair whose rows are one token
        without an answer (`answers` is `lengths`).
        """
        pairs, shape = self.pairs, (len(indices), 2)
        tokens = np.zeros((*shape, self.length), dtype=np.int64)
        lengths, answers = np.ones(shape, dtype=np.int64), np.ones(shape, dtype=np.int64)
        margins, reference = np.zeros(len(indices), np.float32), np.zeros(shape, np.float32)
        for i, index in enumerate(indices):
            if index < 0:
                continue
            margins[i] = pairs.margins[index]
            if self.reference is not None:
                reference[i] = self.reference[index]
            for side in range(2):
                row = 2 * index + side
                ids = pairs.ids[pairs.offsets[row] : pairs.offsets[row + 1]]
                lengths[i, side], answers[i, side] = len(ids), pairs.answers[row]
                tokens[i, side, : len(ids)] = ids
        arrays: dict[str, np.ndarray] = {
            "tokens": tokens,
            "lengths": lengths,
            "answers": answers,
            "margins": margins,
        }
        return arrays if self.reference is None else {**arrays, "reference": reference}
