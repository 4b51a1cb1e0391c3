"""A user's own pacing: a function from a count to a difficulty, named on the command line."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable

from megazero.config.pacing import Pacing, pieces
from megazero.config.user_function import user_function
from megazero.errors import ConfigError

_FLAG = "seqlen_custom_schedule"
_LOOKS = 1000
"""The number of extra counts at which a function is tried, to see whether it ever falls."""


class Custom:
    """A user's function as a pacing, with `hardest` as the largest difficulty.

    Args:
        name: name of the function in messages.
        function: maps a count, from 1 on, to a difficulty: a positive integer that never falls. It must
            depend on the count alone, because every rank calls a copy of its own.
        hardest: the difficulty at the end.
    """

    def __init__(self, name: str, function: Callable[[int], int], hardest: int):
        self.name = name
        self.hardest = hardest
        self._function = function
        self._counts: list[int] = []
        self._values: list[int] = []

    def at(self, count: int) -> int:
        """The difficulty at `count`.

        Raises:
            ConfigError: the function fails, returns anything but a positive integer, or falls.
        """
        place = bisect_left(self._counts, count)
        if place < len(self._counts) and self._counts[place] == count:
            return min(self._values[place], self.hardest)
        value = self.ask(count)
        self._counts.insert(place, count)
        self._values.insert(place, value)
        # Counts are kept in order, so a fall shows between the new count and a neighbour.
        for first in (place - 1, place):
            if first >= 0 and first + 1 < len(self._counts):
                self._compare(first, first + 1)
        return min(value, self.hardest)

    def ask(self, count: int) -> int:
        """Call the function itself, without the limit of `hardest`."""
        try:
            answer = self._function(count)
        except Exception as error:
            raise ConfigError(
                f"`{_FLAG}` must take every count from 1 on, but {self.name} fails at {count} with "
                f"{type(error).__name__}: {error}; correct it"
            ) from error
        try:
            value = operator.index(answer)
        except TypeError:
            value = 0
        if value < 1 or isinstance(answer, bool):
            raise ConfigError(
                f"`{_FLAG}` must give positive whole numbers, but {self.name} gives {answer!r} at {count}; "
                f"round it"
            )
        return value

    def _compare(self, first: int, second: int) -> None:
        before, after = (min(self._values[i], self.hardest) for i in (first, second))
        if after < before:
            raise ConfigError(
                f"`{_FLAG}` must never fall, but {self.name} gives {before} at {self._counts[first]} and "
                f"{after} at {self._counts[second]}; let it grow or stay"
            )


_: type[Pacing] = Custom


def custom_pacing(name: str, hardest: int) -> Custom:
    """Make a pacing of the function named ``module:function`` or ``path.py:function``.

    Bisection finds where the difficulty changes, but it can miss a fall. So the function is also tried at
    evenly spread counts up to the last change, and called again at two counts, where it must repeat itself.

    Raises:
        ConfigError: there is no such function, or it is not a pacing.
    """
    pacing = Custom(name, user_function(name, _FLAG, ConfigError), hardest)
    last = pieces(pacing)[-1][0] + 1
    for count in sorted({*range(1, min(last, _LOOKS) + 1), *(last * i // _LOOKS + 1 for i in range(_LOOKS))}):
        pacing.at(count)
    for count in (1, last):
        if min(pacing.ask(count), hardest) != pacing.at(count):
            raise ConfigError(
                f"`{_FLAG}` must always give the same for the same count, but {name} does not at {count}; "
                f"let it depend on the count alone"
            )
    return pacing
