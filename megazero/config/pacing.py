"""Pacing: how the difficulty of what is trained on grows with the training (DeepSpeed's schedules).

Pure functions of a count of steps or of tokens, with difficulties as whole numbers. Source of the method: the
Stability-Efficiency Dilemma (Li et al. 2022) and DeepSpeed Data Efficiency (Li et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

MOST_CHANGES = 100_000
"""Of a difficulty: each begins a stretch of the training that is looked at by itself."""

_LAST = 2**62
"""Beyond any training: where the search for the end of a ramp gives up."""


class Pacing(Protocol):
    """A difficulty that never falls."""

    @property
    def hardest(self) -> int:
        """What it grows to."""

    def at(self, count: int) -> int:
        """The difficulty when `count` have been reached, counted from 1."""


@dataclass(frozen=True)
class Root:
    """From `easiest` to `hardest` by the `degree`-th root of the share of `total` that is done; 1 is linear.

    The difficulty is rounded down to a multiple of `step`, but not below the first one that reaches
    `easiest`. The share is not cut off at 1: a `hardest` that is no multiple is reached after `total`.
    """

    easiest: int
    hardest: int
    total: int
    step: int = 1
    degree: float = 1.0

    def at(self, count: int) -> int:
        """The difficulty at `count`."""
        share = (count / self.total) ** (1.0 / self.degree)
        grown = math.floor(share * (self.hardest - self.easiest) + self.easiest)
        least = -(-self.easiest // self.step) * self.step
        return min(max(grown - grown % self.step, least), self.hardest)


@dataclass(frozen=True)
class Discrete:
    """The first of `levels` up to and including ``ends[0]``, the second up to ``ends[1]``, and so on."""

    levels: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def hardest(self) -> int:
        """The last level."""
        return self.levels[-1]

    def at(self, count: int) -> int:
        """The difficulty at `count`."""
        return self.levels[sum(end < count for end in self.ends)]


@dataclass(frozen=True)
class FromZero:
    """The same pacing, counted from 0: what it says of the first step is what `pacing` says of none."""

    pacing: Pacing

    @property
    def hardest(self) -> int:
        """What it grows to."""
        return self.pacing.hardest

    def at(self, count: int) -> int:
        """The difficulty at `count`."""
        return self.pacing.at(count - 1)


def root_of(
    first: int | None, last: int | None, total: int | None, step: int, degree: float | None
) -> Root | None:
    """The ramp of settings that may be missing; None if one is, or if it would not grow."""
    if None in (first, last, total, degree) or first > last:
        return None
    return Root(first, last, total, step, degree)


def levels_of(levels: tuple[int, ...], ends: tuple[int, ...]) -> Discrete | None:
    """The levels of settings that may contradict each other; None if they do."""
    grow = all(a < b for values in (levels, ends) for a, b in pairwise(values))
    return Discrete(levels, ends) if grow and len(levels) == len(ends) + 1 else None


def reached(pacing: Pacing) -> int:
    """The count after which the difficulty is at its hardest: 0 if from the beginning.

    The same as where the last of `pieces` begins, without looking at those before.
    """
    if pacing.at(1) >= pacing.hardest:
        return 0
    return _first_above(pacing, pacing.hardest - 1, 0)


def pieces(pacing: Pacing) -> tuple[tuple[int, int], ...]:
    """(count done before, difficulty from there on), ascending, the first with a count of 0.

    What follows when `count` are done is the `count + 1`-th, so it has the difficulty at `count + 1`.
    """
    return tuple(_changes(pacing))


def _changes(pacing: Pacing) -> Iterator[tuple[int, int]]:
    done, now = 0, pacing.at(1)
    yield done, now
    while now < pacing.hardest:
        done = _first_above(pacing, now, done)
        if done >= _LAST:
            return
        now = pacing.at(done + 1)
        yield done, now


def _first_above(pacing: Pacing, difficulty: int, done: int) -> int:
    """The least count after which the difficulty is above this one, as it is not yet after `done`."""
    reach = 1
    while done + reach < _LAST and pacing.at(done + reach + 1) <= difficulty:
        reach *= 2
    low, high = done + reach // 2, done + reach
    while high - low > 1:
        middle = (low + high) // 2
        if pacing.at(middle + 1) <= difficulty:
            low = middle
        else:
            high = middle
    return high
