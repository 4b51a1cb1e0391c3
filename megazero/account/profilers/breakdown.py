"""Break down the time of a step into phases and into waits for communication.

Marks at the ends of actions and phases divide a step into pieces. Waits are subtracted from the pieces that
they lie in, so that all rows add up to the step. The host never waits for the device: on CUDA, marks are
    events
and times are the device's. Communication beside computation counts only while something waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch

from megazero.account.profiler import ProfiledRun, Profiler
from megazero.account.profilers.breakdown_table import RankStatistics, breakdown_table
from megazero.account.profilers.calls import CollectiveCall
from megazero.account.profilers.clock import Clock, ClockPoint
from megazero.account.profilers.group import OPERATIONS, Listener
from megazero.config.tree.logging import LoggingConfig
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import gather_values
from megazero.pipeline.actions import Action, Op

REST = "rest of the step"
PHASES = ("data", "forward", "backward", "gathers", "reductions", "optimizer", REST)
"""The phases of a step; `gathers` and `reductions` count the work of starting and ending them."""

_OF_ACTION: Mapping[Op, str] = MappingProxyType(
    {
        Op.FORWARD: "forward",
        Op.BACKWARD: "backward",
        Op.INPUT: "backward",
        Op.WEIGHT: "backward",
        Op.GATHER: "gathers",
        Op.RELEASE: "gathers",
        Op.REDUCE: "reductions",
    }
)
# The phase of the time between a timer's last action and its end.
_OF_TIMER = MappingProxyType({"data": "data", "forward-backward": "reductions", "optimizer": "optimizer"})

WaitKey = tuple[str, str]
"""The row of waits for (group, operation)."""

Piece = tuple[str | WaitKey, ClockPoint, ClockPoint, int]
"""(row, begin, end, sign) of a stretch of a step; the sign is 1 for a phase, -1 for a wait within a phase."""

Times = Mapping[str | WaitKey, float]
"""Seconds by phase and by wait."""


class Ledger(Listener):
    """Divides a step into pieces: a mark ends a piece and names it; waits within it are pieces of their own.

    Args:
        clock: takes the marks.
    """

    def __init__(self, clock: Clock):
        self.clock = clock
        self._last: ClockPoint = None
        self._depth = 0
        self._pieces: list[Piece] = []

    def start(self) -> None:
        """Begin a step."""
        self._pieces, self._depth, self._last = [], 0, self.clock.now()

    def mark(self, name: str) -> None:
        """Count the time since the last mark, without the waits in it, as `name`."""
        if self._last is not None:
            now = self.clock.now()
            self._pieces.append((name, self._last, now, 1))
            self._last = now

    def stop(self) -> list[Piece]:
        """End the step, and return its pieces."""
        self.mark(REST)
        self._last = None
        return self._pieces

    def enters(self, call: CollectiveCall, *, waits: bool) -> ClockPoint:
        self._depth += 1
        return None if self._last is None or self._depth > 1 else self.clock.now()

    def leaves(self, call: CollectiveCall, entered: ClockPoint, *, waits: bool) -> None:
        self._depth = max(0, self._depth - 1)
        if entered is not None and self._last is not None:
            self._pieces.append(((call.group, call.operation), entered, self.clock.now(), -1))


def phase_of(action: Action) -> str:
    """The phase of a step that an action is part of."""
    return _OF_ACTION[action.op]


def add_up(pieces: Sequence[Piece], clock: Clock) -> Times:
    """Sum the seconds of each row. A wait precedes the piece of its phase, from which it is subtracted."""
    times: Counter[str | WaitKey] = Counter()
    waited = 0.0
    for name, begin, end, kind in pieces:
        seconds = clock.seconds(begin, end)
        if kind < 0:
            times[name] += seconds  # type: ignore[assignment]  # a counter of floats
            waited += seconds
        else:
            times[name] += seconds - waited  # type: ignore[assignment]  # a counter of floats
            waited = 0.0
    return times


class Breakdown(Profiler, Listener):
    """Prints a table of the times of phases and waits after every log interval.

    Args:
        context: the ranks' groups, without observers.
        settings: the level and the ranks of the table, and the interval.
        clock: takes the marks.
    """

    def __init__(self, context: ParallelContext, settings: LoggingConfig, clock: Clock):
        self.context = context
        self.settings = settings
        self.ledger = Ledger(clock)
        names = sorted(context.groups) if settings.breakdown_level > 1 else []
        self.rows: list[str | WaitKey] = [*PHASES, *((name, o) for name in names for o in OPERATIONS)]
        if not names:
            self.rows.append(("", "all"))
        self._sums: Counter[str | WaitKey] = Counter()
        self._steps = 0
        self._pending: list[list[Piece]] = []
        self._say: Callable[[str], None] = print

    def begin(self, run: ProfiledRun) -> None:
        self._say = run.say

    def acted(self, action: Action, seconds: float) -> None:
        self.ledger.mark(phase_of(action))

    def phase_ends(self, name: str) -> None:
        if name in _OF_TIMER:
            self.ledger.mark(_OF_TIMER[name])

    def enters(self, call: CollectiveCall, *, waits: bool) -> ClockPoint:
        return self.ledger.enters(call, waits=waits)

    def leaves(self, call: CollectiveCall, entered: ClockPoint, *, waits: bool) -> None:
        self.ledger.leaves(call, entered, waits=waits)

    @contextmanager
    def over_step(self, iteration: int) -> Iterator[None]:
        self.ledger.start()
        yield
        self._pending.append(self.ledger.stop())
        self._settle()
        if iteration % self.settings.log_interval == 0:
            self._report(iteration)

    def _settle(self) -> None:
        """Add up the steps whose end the device has reached."""
        clock = self.ledger.clock
        while self._pending and clock.reached(self._pending[0][-1][2]):
            for name, seconds in add_up(self._pending.pop(0), clock).items():
                row = ("", "all") if isinstance(name, tuple) and name not in self.rows else name
                self._sums[row] += seconds  # type: ignore[assignment]  # a counter of floats
            self._steps += 1

    def _report(self, iteration: int) -> None:
        """Print the means per step; every rank calls this.

        Ranks' times are gathered only if the settings ask for all ranks; else a few reductions of one number
        per row suffice.
        """
        steps, group = max(1, self._steps), self.context.groups["host"]
        own = torch.tensor([self._sums[row] / steps for row in self.rows], dtype=torch.float64)
        own = torch.cat([own, own.sum().view(1)])
        if self.settings.timing_log_option == "all":
            everyone = torch.tensor(gather_values(group, own.tolist()), dtype=torch.float64)
            spread = RankStatistics.of_all(own, everyone)
        else:
            spread = RankStatistics.over(own, group)
        if self.context.rank == 0:
            first = iteration - self._steps + 1
            rows = [*self.rows, "whole step"]
            for line in breakdown_table(
                rows, spread, (first, iteration), self.settings, self.ledger.clock.device
            ):
                self._say(line)
        self._sums.clear()
        self._steps = 0
