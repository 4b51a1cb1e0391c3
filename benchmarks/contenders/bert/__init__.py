"""Who is compared in `bert_step.py`: one file per way to train a BERT, and the samples that all of them take.

Each has ``build(shape, rank, world_size, **options) -> step``, as in `benchmarks.contenders`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

import numpy as np

from benchmarks.contenders import Shape

Batch = TypeVar("Batch")

STEPS = 5  # of different samples, which then come again


@dataclass(frozen=True)
class BertShape(Shape):
    """A BERT of 24M parameters with both heads and a tied vocabulary, and its samples.

    Attributes:
        dropout: of hidden states and of attention probabilities.
        short: share of the samples that are short, as `--short-seq-prob` makes them.
    """

    family: str = "bert"
    dropout: float = 0.0
    short: float = 0.1

    def lengths(self, rng: np.random.Generator) -> np.ndarray:
        """Of all samples, in random order: most lack up to 15 tokens, the short ones are of all lengths."""
        count = STEPS * self.accumulations * self.micro_batch
        short = round(self.short * count)
        lengths = self.sequence - rng.integers(0, 16, count)
        lengths[:short] = (np.arange(short) + 0.5) / short * self.sequence
        return rng.permutation(lengths)

    @property
    def real_share(self) -> float:
        """The share of rank 0's positions that hold tokens."""
        tokens = sum(arrays["lengths"].sum() for step in self.samples(0) for arrays in step)
        return round(float(tokens) / (STEPS * self.tokens_per_step), 3)

    def samples(self, rank: int) -> list[list[dict[str, np.ndarray]]]:
        """The arrays of a `BERTDataset`, for each step and each of its micro-batches.

        Each sample has two segments; 15% of its tokens are to be restored.
        """
        rng = np.random.default_rng(rank)
        lengths = self.lengths(rng)[:, None]
        size = (len(lengths), self.sequence)
        places = np.arange(self.sequence)
        real = places < lengths
        order = np.argsort(np.where(real, rng.random(size), 2.0), axis=1)
        mask = np.zeros(size, dtype=bool)
        np.put_along_axis(mask, order, places < np.round(0.15 * lengths), axis=1)
        arrays = {
            "tokens": np.where(real, rng.integers(0, self.vocab, size), 0),
            "token_types": (real & (places >= lengths // 2)).astype(np.int64),
            "labels": np.where(mask, rng.integers(0, self.vocab, size), -1),
            "loss_mask": mask.astype(np.float32),
            "lengths": lengths[:, 0],
            "is_random": rng.integers(0, 2, len(lengths)),
        }
        micro, per_step = self.micro_batch, self.accumulations * self.micro_batch
        return [
            [
                {name: array[start : start + micro] for name, array in arrays.items()}
                for start in range(step, step + per_step, micro)
            ]
            for step in range(0, len(lengths), per_step)
        ]

    def steps(self, rank: int, collate: Callable[[dict[str, np.ndarray]], Batch]) -> Iterator[list[Batch]]:
        """The micro-batches of each step, without end; they are all made beforehand."""
        return cycle([[collate(arrays) for arrays in step] for step in self.samples(rank)])
