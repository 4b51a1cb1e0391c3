"""Happens-before over memory: who read and wrote which bytes, and which pairs of that nothing orders.

An agent is whatever works through things in order: a thread of the host, a stream of the device, the disk.
Each has a vector clock (Lamport 1978, Fidge 1988): for each agent, how far it is known to have come. Two
accesses to the same bytes, of which one writes, must be ordered; a pair that is not is a race.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """Bytes that an agent read or wrote, at a time of its own clock."""

    agent: str
    time: int
    start: int
    stop: int
    writes: bool
    what: str


class Order:
    """Accesses so far, and the races among them.

    Attributes:
        races: pairs that nothing orders, as (earlier, later), by what the two did; and how often.
        accesses: how many were recorded.
    """

    def __init__(self) -> None:
        self.races: Counter[tuple[str, str]] = Counter()
        self.accesses = 0
        self._clocks: dict[str, Clock] = {}
        self._memory: dict[object, dict[tuple[str, int, int, bool], Access]] = {}
        self._lock = threading.RLock()

    def now(self, agent: str) -> Clock:
        """A point that the agent has come to."""
        with self._lock:
            return dict(self._clocks.get(agent, {}))

    def after(self, agent: str, point: Clock) -> None:
        """Order all that the agent does from now on after a point."""
        with self._lock:
            clock = self._clocks.setdefault(agent, {})
            for other, time in point.items():
                if clock.get(other, 0) < time:
                    clock[other] = time

    def knows(self, agent: str, point: Clock) -> bool:
        """Whether the agent comes after a point anyway."""
        with self._lock:
            clock = self._clocks.get(agent, {})
            return all(clock.get(other, 0) >= time for other, time in point.items())

    def access(self, agent: str, where: object, start: int, stop: int, *, writes: bool, what: str) -> None:
        """Record that the agent reads or writes bytes of a piece of memory."""
        if start >= stop:
            return
        with self._lock:
            self.accesses += 1
            clock = self._clocks.setdefault(agent, {})
            clock[agent] = time = clock.get(agent, 0) + 1
            known, gone = self._memory.setdefault(where, {}), []
            for key, other in known.items():
                if other.stop <= start or stop <= other.start:
                    continue
                ordered = clock.get(other.agent, 0) >= other.time
                if not ordered and (writes or other.writes):
                    self.races[f"{other.agent}: {other.what}", f"{agent}: {what}"] += 1
                if writes and ordered and start <= other.start and other.stop <= stop:
                    gone.append(key)  # what is ordered after this write is ordered after that, too
            for key in gone:
                del known[key]
            known[agent, start, stop, writes] = Access(agent, time, start, stop, writes, what)

    def users(self, where: object, *kinds: str) -> Clock:
        """The latest accesses to memory by agents of some kinds, which their names begin with."""
        point: Clock = {}
        with self._lock:
            for access in self._memory.get(where, {}).values():
                if access.agent.startswith(kinds):
                    point[access.agent] = max(point.get(access.agent, 0), access.time)
        return point

    def forget(self, where: object) -> None:
        """Drop what is known of memory that is gone."""
        with self._lock:
            self._memory.pop(where, None)
