"""Named phase timers: an object that is passed to any code that has a phase to time.

    timers = Timers()
    with timers("forward-backward"):
        ...
    timers.collect()  # {"forward-backward": 0.113}

Phases of a step are `data`, `forward-backward`, `optimizer`, `evaluation` and `save`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Timers:
    """Adds up the wall time of each phase until `collect`.

    CUDA runs asynchronously: without `synchronize` a phase's time is that of launching its kernels, and the
    first phase that waits is charged for all of them. Synchronizing costs speed, so use it only to look at
    the times.

    Args:
        device: the device on which the timed work runs.
        synchronize: whether to wait for a CUDA device at both ends of each phase.
        clock: a monotonic clock, in seconds.
        ended: called with the name of each phase at its end.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        synchronize: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        ended: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._device = torch.device(device)
        self._wait = synchronize and self._device.type == "cuda"
        self._clock = clock
        self._ended = ended
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body as phase `name`. Phases may nest; a body that raises is timed, too."""
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
            self._ended(name)

    def collect(self) -> dict[str, float]:
        """Return and reset each phase's seconds, in order of first use."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _now(self) -> float:
        if self._wait:
            torch.cuda.synchronize(self._device)
        return self._clock()
