"""The bytes that are alive over a step, by what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megazero.train.observe.memory import KINDS


@dataclass
class Timeline:
    """The bytes that are alive over a step.

    Attributes:
        times: seconds since the step began, in order.
        held: bytes by kind at each of these times.
        actions: (begin, end, name) of what the executor did, in seconds.
    """

    times: list[float] = field(default_factory=list)
    held: list[Mapping[str, int]] = field(default_factory=list)
    actions: list[tuple[float, float, str]] = field(default_factory=list)

    def add(self, seconds: float, held: Mapping[str, int]) -> None:
        """Add a point."""
        self.times.append(seconds)
        self.held.append(dict(held))

    @property
    def kinds(self) -> list[str]:
        """The kinds that hold anything, in the order of `KINDS`."""
        names = {kind for held in self.held for kind, size in held.items() if size}
        return [*(kind for kind in KINDS if kind in names), *sorted(names.difference(KINDS))]

    def peak(self) -> int:
        """The index of the point with the most bytes."""
        return max(range(len(self.held)), key=lambda at: sum(self.held[at].values()))

    def doing(self, seconds: float) -> str:
        """The action of that time, in words."""
        names = [name for begin, end, name in self.actions if begin <= seconds <= end]
        return names[0] if names else "between actions"

    def events(self, rank: int) -> list[dict[str, Any]]:
        """The timeline as Chrome's trace events: counters by kind, and a range for each action."""
        kinds = self.kinds
        counters = [
            {
                "ph": "C",
                "name": "bytes",
                "pid": rank,
                "ts": 1e6 * at,
                "args": {kind: held.get(kind, 0) for kind in kinds},
            }
            for at, held in zip(self.times, self.held, strict=True)
        ]
        ranges = [
            {"ph": "X", "name": name, "pid": rank, "tid": 0, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
            for begin, end, name in self.actions
        ]
        named = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"memory of rank {rank}"}}
        return [named, *counters, *ranges]
