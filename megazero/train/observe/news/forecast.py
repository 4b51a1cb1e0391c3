"""The forecast of a training's end, from its recent steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta
from statistics import median

from megazero.train.observe.metrics import StepMetrics

_RECENT = 101  # steps
_THIS_WEEK = timedelta(days=6)
_MOST = 1e10  # seconds; a date that is later says nothing


class Forecast:
    """Says when a training will end.

    The tokens that are left take the median of recent steps' seconds for a token, however the batch grows,
    times what evaluations, checkpoints and all else have added to the steps so far. The first step of a
    process, which warms up, does not count.

    Args:
        tokens: the tokens of the whole training, by its plan.
        clock: the clock on the wall, in seconds.
    """

    def __init__(self, tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = tokens, clock
        self._done: int | None = None
        self._began = self._stepping = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def step(self, metrics: StepMetrics) -> None:
        """Take note of a step that has just ended."""
        before, self._done = self._done, metrics["consumed_tokens"]
        if before is None:
            self._began = self._clock()
            return
        self._stepping += metrics["seconds"]
        if metrics["consumed_tokens"] > before:  # and not gone back to a checkpoint
            self._recent.append(metrics["seconds"] / (metrics["consumed_tokens"] - before))

    def text(self) -> str | None:
        """The time that is left and the local date of the end; None where unknown, or nothing is left."""
        if not self._recent or self._stepping <= 0 or (left := self._total - (self._done or 0)) <= 0:
            return None
        seconds = left * median(self._recent) * max(1.0, (self._clock() - self._began) / self._stepping)
        if seconds > _MOST:
            return None
        rest = timedelta(seconds=round(seconds))
        return f"ETA: {rest} ({datetime.now() + rest:{'%a' if rest < _THIS_WEEK else '%Y-%m-%d'} %H:%M})"
