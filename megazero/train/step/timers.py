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

    CUDA runs asynchronously, so without `synchronize` a phase's time there is the time to launch its work,
    and the first phase that waits is charged for everything. Waiting costs speed: ask for it only when
    someone looks at the times.

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
        """Time the body under `name`; phases may nest, and a body that raises is counted too."""
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
            self._ended(name)

    def collect(self) -> dict[str, float]:
        """Return each phase's seconds since the last call, in order of first use, and reset them."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _now(self) -> float:
        if self._wait:
            torch.cuda.synchronize(self._device)
        return self._clock()
