"""Clocks of the host and of a device, which are read without waiting for the device."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

ClockPoint = Any
"""A point in time of a clock: seconds of the host, or a CUDA event."""


class Clock(Protocol):
    """Takes points in time.

    Attributes:
        device: whose time it is, ``host`` or ``device``.
    """

    device: str

    def now(self) -> ClockPoint:
        """Return the point at which all work queued so far is done."""

    def reached(self, point: ClockPoint) -> bool:
        """Whether the device has reached a point."""

    def seconds(self, begin: ClockPoint, end: ClockPoint) -> float:
        """Return the time between two points that have been reached."""


class HostClock(Clock):
    """The host's clock, for devices whose work is synchronous, such as a CPU."""

    device = "host"

    def now(self) -> float:
        return time.perf_counter()

    def reached(self, point: ClockPoint) -> bool:
        return True

    def seconds(self, begin: ClockPoint, end: ClockPoint) -> float:
        return float(end - begin)


class CudaClock(Clock):
    """Events on the current stream, whose times are read later."""

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
    """Return the clock for work on a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
