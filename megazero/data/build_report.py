"""Lines about work that takes long, during which a job seemed to hang.

`BuildReport`: what is built of a dataset, for how many samples and how far it is, on stderr. `Patience`: how
far anything else is, such as an evaluation, in few lines.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TypeVar

_PATIENCE = 5.0  # seconds that may pass in silence
_T = TypeVar("_T")


class Patience:
    """Says how far something is once it has taken some seconds, and again whenever the time has doubled.

    Args:
        say: takes a line.
        what: what goes on, as in "evaluating on validation".
    """

    def __init__(self, say: Callable[[str], None], what: str):
        self._say = say
        self._what = what
        self._began = time.monotonic()
        self._next = _PATIENCE

    def tell(self, how_far: str) -> None:
        """Say how far it is, if that is due."""
        elapsed = time.monotonic() - self._began
        if elapsed >= self._next:
            self._next = 2 * elapsed
            self._say(f"{self._what}: {how_far}, after {elapsed:.0f} s")

    def over(self, batches: Iterable[_T], total: int) -> Iterator[_T]:
        """The batches, whose number is told on the way."""
        for number, batch in enumerate(batches):
            self.tell(f"{number} of {total} batches")
            yield batch


class BuildReport:
    """Reports a build in steps that takes more than some seconds, or is going to.

        with BuildReport("order of the train split", samples, forecast) as report:
            report.step("documents")

    Every process that does not find an index builds it; one on each machine, local rank 0, speaks.
    """

    def __init__(self, what: str, samples: int, forecast: float):
        """Take the name of the thing to build, its samples, and the seconds that it may take."""
        self.what = what
        self.samples = samples
        self.forecast = forecast
        self._began = time.monotonic()
        self._open = False
        self._speaks = os.environ.get("LOCAL_RANK", "0") == "0"

    def __enter__(self) -> BuildReport:
        if self.forecast >= _PATIENCE:
            self._begin(f", which takes about {self.forecast:.0f} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open and kind is None:
            self._say(f"built the {self.what} in {self._elapsed:.0f} s")

    def step(self, what: str) -> None:
        """Report that this part is next."""
        if not self._open and self._elapsed >= _PATIENCE:  # slower than was forecast
            self._begin()
        if self._open:
            self._say(f"building the {self.what}: {what}, after {self._elapsed:.0f} s")

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _begin(self, forecast: str = "") -> None:
        self._open = True
        self._say(f"building the {self.what}: {self.samples:,} samples{forecast}")

    def _say(self, line: str) -> None:
        if self._speaks:
            print(line, file=sys.stderr, flush=True)
