"""The base class of what looks at the steps of a run from beside it, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from megazero.layers.inputs import Skipping
from megazero.mpu.context import ParallelContext
from megazero.pipeline.actions import Action
from megazero.pipeline.executor import Executor
from megazero.zero.store.store import Store

TokenCount = Callable[[int, Skipping], float]
"""(tokens of a sequence, what the step skips) -> FLOPs of forward and backward for one of them."""


@dataclass(frozen=True, eq=False)
class ProfiledRun:
    """The parts of a run that profilers look at.

    Attributes:
        executor: runs the actions of the pipeline.
        models: this stage's trained parts of the model, by their numbers along the model.
        store: holds weights, gradients and the optimizer's state.
        flops_per_token: the count by formula.
        say: takes a line for a person.
    """

    executor: Executor[Any]
    models: Mapping[int, nn.Module]
    store: Store
    flops_per_token: TokenCount
    say: Callable[[str], None]


class Profiler:
    """Looks at each step. One that derives from it defines what it needs; by itself it looks at nothing."""

    def watched(self, context: ParallelContext) -> ParallelContext:
        """Return the same context, of whose calls this learns."""
        return context

    def begin(self, run: ProfiledRun) -> None:
        """Take the run whose steps follow."""

    def over_step(self, iteration: int) -> AbstractContextManager[None]:
        """Return a context around a step, from reading its samples until its metrics are known."""
        return nullcontext()

    def acted(self, action: Action, seconds: float) -> None:
        """Take note of an action of the executor, which took `seconds` without waits for other stages."""

    def phase_ends(self, name: str) -> None:
        """Take note of the end of a phase of the timers."""

    def conclude(self) -> None:
        """Report on the training, which is over; every rank calls this."""
