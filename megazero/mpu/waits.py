"""The time that a process waits in calls of its groups: for other members, and for the data to move."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

_SAMPLED = 10  # one step in so many, on CUDA


@dataclass(frozen=True)
class Waited:
    """The time that one step waited.

    Attributes:
        host: seconds that its host was inside of calls; 0 on CUDA, where they return at once.
        spans: pairs of events around each wait of the device.
    """

    host: float = 0.0
    spans: tuple[tuple[torch.cuda.Event, torch.cuda.Event], ...] = ()

    @property
    def seconds(self) -> float | None:
        """The sum; None while the device has not finished the step, for which this does not wait."""
        if not all(end.query() for _, end in self.spans):
            return None
        milliseconds: float = sum(start.elapsed_time(end) for start, end in self.spans)
        return self.host + milliseconds / 1000.0


class Waits:
    """Adds up the time that each step waits.

    On a CPU this is the time inside of calls. On CUDA calls return at once and the stream waits instead of
    the host, so events around the wait measure it, in one step out of ten.

    Args:
        device: where the tensors of the calls live.
        new_event: makes an event that takes the time; by default, one of CUDA.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        new_event: Callable[[], torch.cuda.Event] | None = None,
    ):
        self._on_cuda = torch.device(device).type == "cuda"
        self._new_event = new_event or partial(torch.cuda.Event, enable_timing=True)
        self._host = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._steps = 0
        self._measures = not self._on_cuda

    def start_step(self) -> None:
        """Start counting for a new step, if it is one that is measured."""
        self._host, self._spans = 0.0, []
        self._measures = not self._on_cuda or self._steps % _SAMPLED == 0
        self._steps += 1

    def end_step(self) -> Waited | None:
        """Return the time that the step waited; None if it is not measured."""
        waited = Waited(self._host, tuple(self._spans)) if self._measures else None
        self._measures = not self._on_cuda
        return waited

    def begin(self, *, later: bool = False) -> float | torch.cuda.Event | None:
        """Begin a wait; returns its beginning, which `end` takes.

        Args:
            later: whether the call is only started, which takes time between threads.
        """
        if not self._on_cuda:
            return time.perf_counter()
        return self._now() if self._measures and not later else None

    def end(self, began: float | torch.cuda.Event | None) -> None:
        """End a wait."""
        if isinstance(began, float):
            self._host += time.perf_counter() - began
        elif began is not None:
            self._spans.append((began, self._now()))

    def _now(self) -> torch.cuda.Event:
        event = self._new_event()
        event.record()
        return event
