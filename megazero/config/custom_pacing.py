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
"""The number of further counts at which a function is asked, to see whether it falls."""


class Custom:
    """The pacing by a user's function, limited to `hardest`.

    Args:
        name: name of the function in messages.
        function: the difficulty, a positive whole number, for every count from 1 on. It must depend on
            nothing else, as every rank asks its own, and must never fall.
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
            ConfigError: the function fails, gives something else than a positive whole number, or falls.
        """
        place = bisect_left(self._counts, count)
        if place < len(self._counts) and self._counts[place] == count:
            return min(self._values[place], self.hardest)
        value = self.ask(count)
        self._counts.insert(place, count)
        self._values.insert(place, value)
        for first in (place - 1, place):
            if first >= 0 and first + 1 < len(self._counts):
                self._compare(first, first + 1)
        return min(value, self.hardest)

    def ask(self, count: int) -> int:
        """The answer of the function itself at `count`, not limited."""
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
    """The pacing by a function named ``module:function`` or ``path.py:function``.

    Where it changes is found by bisection, which would not see every fall, so it is asked at further counts
    up to the last change, and once more at some that it was asked before.

    Raises:
        ConfigError: there is no such function, or it is no pacing.
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
