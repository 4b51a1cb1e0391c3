"""Pacing: the growth of the difficulty of the data with the training (DeepSpeed's schedules).

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
"""The most changes that a difficulty may make: each begins a segment of the training, held in a table."""

_LAST = 2**62
"""A count beyond any training, at which the search for the end of a ramp gives up."""


class Pacing(Protocol):
    """A difficulty that never falls."""

    @property
    def hardest(self) -> int:
        """The difficulty that it grows to."""

    def at(self, count: int) -> int:
        """The difficulty at a count of steps or tokens, from 1."""


@dataclass(frozen=True)
class Root:
    """The growth from `easiest` to `hardest` by the `degree`-th root of the done share of `total`.

    A `degree` of 1 is linear. The difficulty is rounded down to a multiple of `step`, but not below the first
    one that reaches `easiest`. The share is not cut off at 1: a `hardest` that is no multiple is reached
    after `total`.
    """

    easiest: int
    hardest: int
    total: int
    step: int = 1
    degree: float = 1.0

    def at(self, count: int) -> int:
        """The difficulty at `count`."""
        share: float = (count / self.total) ** (1.0 / self.degree)
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
    """A pacing counted from 0: its difficulty at a count is that of `pacing` at the count before."""

    pacing: Pacing

    @property
    def hardest(self) -> int:
        """The difficulty that it grows to."""
        return self.pacing.hardest

    def at(self, count: int) -> int:
        """The difficulty at `count`."""
        return self.pacing.at(count - 1)


_: tuple[type[Pacing], ...] = (Root, Discrete, FromZero)


def root_of(
    first: int | None, last: int | None, total: int | None, step: int, degree: float | None
) -> Root | None:
    """Make a ramp; None if a setting is missing, or if the ramp would not grow."""
    if first is None or last is None or total is None or degree is None or first > last:
        return None
    return Root(first, last, total, step, degree)


def levels_of(levels: tuple[int, ...], ends: tuple[int, ...]) -> Discrete | None:
    """Make a pacing by levels; None if the settings contradict each other."""
    grow = all(a < b for values in (levels, ends) for a, b in pairwise(values))
    return Discrete(levels, ends) if grow and len(levels) == len(ends) + 1 else None


def reached(pacing: Pacing) -> int:
    """The count after which the difficulty is at its hardest; 0 if it is so from the beginning.

    The last of `pieces` begins there; the pieces before it are not computed.
    """
    if pacing.at(1) >= pacing.hardest:
        return 0
    return _first_above(pacing, pacing.hardest - 1, 0)


def pieces(pacing: Pacing) -> tuple[tuple[int, int], ...]:
    """The pieces of constant difficulty: (count done before, difficulty from there on), ascending from 0.

    The step after `count` steps is step `count + 1`, whose difficulty is the one at that count.
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
    """The least count after which the difficulty is above `difficulty`; it is more than `done`."""
    # Double the reach until the difficulty is above, then bisect: a user's function may be slow.
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
