"""Progress lines for work that takes long, so that a job does not seem to hang.

`BuildReport` reports the build of a dataset's index on stderr. `ProgressLog` reports other work, such as
an evaluation.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TypeVar

_SILENT_SECONDS = 5.0
_T = TypeVar("_T")


class ProgressLog:
    """Reports progress after some seconds, and again whenever the elapsed time has doubled.

    Args:
        say: writes a line.
        what: the work, as in "evaluating on validation".
    """

    def __init__(self, say: Callable[[str], None], what: str):
        self._say = say
        self._what = what
        self._began = time.monotonic()
        self._next = _SILENT_SECONDS

    def tell(self, how_far: str) -> None:
        """Report `how_far` the work is, if a report is due."""
        elapsed = time.monotonic() - self._began
        if elapsed >= self._next:
            self._next = 2 * elapsed
            self._say(f"{self._what}: {how_far}, after {elapsed:.0f} s")

    def over(self, batches: Iterable[_T], total: int) -> Iterator[_T]:
        """Iterate over `batches`, reporting their number."""
        for number, batch in enumerate(batches):
            self.tell(f"{number} of {total} batches")
            yield batch


class BuildReport:
    """Reports a build that takes more than some seconds, or that is expected to.

        with BuildReport("order of the train split", samples, forecast) as report:
            report.step("documents")

    what: the thing to build; forecast: the expected time in seconds. One process builds what goes into a
    cache, and all build what does not; local rank 0 of each machine reports.
    """

    def __init__(self, what: str, samples: int, forecast: float):
        self.what = what
        self.samples = samples
        self.forecast = forecast
        self._began = time.monotonic()
        self._open = False

    def __enter__(self) -> BuildReport:
        if self.forecast >= _SILENT_SECONDS:
            self._begin(f", which takes about {self.forecast:.0f} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open and kind is None:
            say_once_per_host(f"built the {self.what} in {time.monotonic() - self._began:.0f} s")

    def step(self, what: str) -> None:
        """Report that the part `what` is built next."""
        elapsed = time.monotonic() - self._began
        if not self._open and elapsed >= _SILENT_SECONDS:  # slower than the forecast
            self._begin()
        if self._open:
            say_once_per_host(f"building the {self.what}: {what}, after {elapsed:.0f} s")

    def _begin(self, forecast: str = "") -> None:
        self._open = True
        say_once_per_host(f"building the {self.what}: {self.samples:,} samples{forecast}")


def say_once_per_host(line: str) -> None:
    """Print a line on stderr, as local rank 0."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
