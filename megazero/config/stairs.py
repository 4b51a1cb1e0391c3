"""Global batches that change at set numbers of tokens (Megatron-LM's `--step-batch-size-schedule`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated

from pydantic import AfterValidator

_SUFFIXES = MappingProxyType({"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12})


def _count(text: str) -> int:
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    count = Decimal(text[:-1] if factor > 1 else text) * factor
    if count != int(count):
        raise ValueError(f"{text} is no whole number")
    return int(count)


def _read_stairs(stairs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pairs with their numbers in full, in the order of the thresholds."""
    words = [word for text in stairs for word in text.replace(",", " ").split()]
    try:
        pairs = sorted(tuple(map(_count, word.split(":", 1))) for word in words)
    except (ArithmeticError, ValueError):
        pairs = [()]
    if any(len(pair) != 2 or pair[0] < 0 or pair[1] < 1 for pair in pairs):
        raise ValueError("must be THRESHOLD:SIZE pairs such as 0:768 250B:1536")
    return tuple(f"{threshold}:{size}" for threshold, size in pairs)


Stairs = Annotated[tuple[str, ...], AfterValidator(_read_stairs)]
"""Sizes of the global batch, each with the number of tokens from which it holds: THRESHOLD:SIZE."""


def final_size(stairs: tuple[str, ...]) -> int:
    """The last size."""
    return int(stairs[-1].partition(":")[2])


@dataclass(frozen=True)
class BatchStairs:
    """The global batch size as a function of the samples consumed, in steps of any width and height.

    Attributes:
        pieces: (samples from which the size holds, batch size), in ascending order from 0.
    """

    pieces: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, stairs: tuple[str, ...], seq_length: int) -> BatchStairs:
        """The batch sizes of `--step-batch-size-schedule`; a threshold is rounded down to whole samples."""
        pairs = (stair.split(":") for stair in stairs)
        return cls(tuple((int(tokens) // seq_length, int(size)) for tokens, size in pairs))

    @property
    def rise(self) -> bool:
        """Whether the pieces begin at 0, and each at least one sample after the one before it."""
        return self.pieces[0][0] == 0 and all(a[0] < b[0] for a, b in pairwise(self.pieces))

    @property
    def sizes(self) -> Sequence[int]:
        """All sizes, in order."""
        return [size for _, size in self.pieces]

    @property
    def start(self) -> int:
        """The first size."""
        return self.pieces[0][1]

    @property
    def final(self) -> int:
        """The last size."""
        return self.pieces[-1][1]

    @property
    def increments(self) -> int:
        """The number of times that the batch changes."""
        return len(self.pieces) - 1

    def at(self, consumed_samples: int) -> int:
        """The global batch size of the step that starts after `consumed_samples`."""
        return self.pieces[max(0, self._following(consumed_samples) - 1)][1]

    def steps_held(self, consumed_samples: int) -> int | None:
        """The number of steps after `consumed_samples` with this size; None if it never changes again."""
        following = self._following(consumed_samples)
        if following == len(self.pieces):
            return None
        return -(-(self.pieces[following][0] - consumed_samples) // self.at(consumed_samples))

    def _following(self, consumed_samples: int) -> int:
        return bisect_right(self.pieces, consumed_samples, key=lambda piece: piece[0])
