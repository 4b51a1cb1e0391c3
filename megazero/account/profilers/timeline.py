"""The bytes that are alive over a step, by kind."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from megazero.account.memory import KINDS


@dataclass
class MemoryHistory:
    """The bytes that are alive over a step.

    Attributes:
        times: seconds since the step began, in order.
        alive: bytes by kind at each time.
        actions: (begin, end, name) of the executor's actions, in seconds.
    """

    times: list[float] = field(default_factory=list)
    alive: list[Mapping[str, int]] = field(default_factory=list)
    actions: list[tuple[float, float, str]] = field(default_factory=list)

    def add(self, seconds: float, alive: Mapping[str, int]) -> None:
        """Add a point."""
        self.times.append(seconds)
        self.alive.append(dict(alive))

    @property
    def kinds(self) -> list[str]:
        """The kinds that hold anything, in the order of `KINDS`."""
        names = {kind for alive in self.alive for kind, size in alive.items() if size}
        return [*(kind for kind in KINDS if kind in names), *sorted(names.difference(KINDS))]

    @property
    def ends(self) -> float:
        """The end of the last point or action, in seconds."""
        return max(*self.times[-1:], *(end for _, end, _ in self.actions), 0.0)

    def peak(self) -> int:
        """The index of the point with the most bytes."""
        return max(range(len(self.alive)), key=lambda at: sum(self.alive[at].values()))

    def envelope(self, count: int) -> list[int]:
        """The indices of at most `count` + 2 points: the fullest of each stretch, and both ends."""
        points = len(self.times)
        if points <= count:
            return list(range(points))
        edges = [points * i // count for i in range(count + 1)]
        totals = [sum(alive.values()) for alive in self.alive]
        most = [max(range(a, b), key=totals.__getitem__) for a, b in itertools.pairwise(edges)]
        return sorted({0, *most, points - 1})

    def doing(self, seconds: float) -> str:
        """The name of the action at a time; where one ends as another begins, that of the latter."""
        names = [name for begin, end, name in self.actions if begin <= seconds <= end]
        return names[-1] if names else "between actions"

    def events(self, rank: int) -> list[dict[str, object]]:
        """The timeline as events of a Chrome trace: counters by kind, and a range for each action."""
        kinds = self.kinds
        counters = [
            {
                "ph": "C",
                "name": "bytes",
                "pid": rank,
                "ts": 1e6 * at,
                "args": {kind: alive.get(kind, 0) for kind in kinds},
            }
            for at, alive in zip(self.times, self.alive, strict=True)
        ]
        ranges = [
            {"ph": "X", "name": name, "pid": rank, "tid": 0, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
            for begin, end, name in self.actions
        ]
        named = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"memory of rank {rank}"}}
        return [named, *counters, *ranges]
