"""The base class of what looks at the steps of a run from beside it, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from megazero.layers.inputs import Skipping
from megazero.mpu.context import ParallelContext
from megazero.train.step.engine import Engine

TokenCount = Callable[[int, Skipping], float]
"""(tokens of a sequence, what the step skips) -> FLOPs of forward and backward for one of them."""


class Profiler:
    """Looks at each step. One that derives from it defines what it needs; by itself it looks at nothing."""

    def watched(self, context: ParallelContext) -> ParallelContext:
        """The same context, of whose calls this learns."""
        return context

    def begin(self, engine: Engine, say: Callable[[str], None], flops_per_token: TokenCount) -> None:
        """Take the engine whose steps follow, what takes a line for a person, and the count by formula."""

    def over_step(self, iteration: int) -> AbstractContextManager[None]:
        """A context around a step, from reading its samples until its metrics are known."""
        return nullcontext()

    def phase_ends(self, name: str) -> None:
        """A phase of the timers has ended."""

    def conclude(self) -> None:
        """Report on the training, which is over; every rank calls this."""
