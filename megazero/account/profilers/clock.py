"""Points in time of the host or of a device, taken without waiting for the device."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

ClockPoint = Any
"""A point in time, as a clock takes it: seconds of the host, or an event of the device."""


class Clock(Protocol):
    """Takes points in time.

    Attributes:
        device: the device whose time it is, in words.
    """

    device: str

    def now(self) -> ClockPoint:
        """Return the point that the device has reached once all work queued so far is done."""

    def reached(self, point: ClockPoint) -> bool:
        """Whether the device has come to a point."""

    def seconds(self, begin: ClockPoint, end: ClockPoint) -> float:
        """Return the time between two points that have been reached."""


class HostClock(Clock):
    """The host's clock, for a device that computes while the host waits."""

    device = "host"

    def now(self) -> float:
        return time.perf_counter()

    def reached(self, point: ClockPoint) -> bool:
        return True

    def seconds(self, begin: ClockPoint, end: ClockPoint) -> float:
        return float(end - begin)


class CudaClock(Clock):
    """Events on the current stream: the host goes on, and asks for their times later."""

    device = "device"

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, point: torch.cuda.Event) -> bool:
        return bool(point.query())

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1000.0


def clock_of(device: torch.device) -> Clock:
    """Return the clock by which a rank's work on this device is timed."""
    return CudaClock() if device.type == "cuda" else HostClock()
