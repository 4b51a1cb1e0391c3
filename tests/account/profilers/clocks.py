"""A clock that tests set, and events that a device reaches when tests say so."""

from __future__ import annotations

from megazero.account.profilers.clock import Clock


class SetClock(Clock):
    """Its time is `time`, in seconds; points later than `done` have not been reached."""

    device = "test"

    def __init__(self) -> None:
        self.time, self.done = 0.0, float("inf")

    def now(self) -> float:
        return self.time

    def reached(self, point: float) -> bool:
        return point <= self.done

    def seconds(self, begin: float, end: float) -> float:
        assert max(begin, end) <= self.done, "the time of a point that has not been reached"
        return end - begin
