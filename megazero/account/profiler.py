"""The base class of profilers, which observe the steps of a run without changing them."""

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
"""(sequence length, what the step skips) -> FLOPs of forward and backward per token."""


@dataclass(frozen=True, eq=False)
class ProfiledRun:
    """The parts of a run that profilers observe.

    Attributes:
        executor: runs the actions of the pipeline.
        models: this stage's trained chunks of the model, by chunk number.
        store: holds weights, gradients and the optimizer's state.
        flops_per_token: FLOPs by formula.
        say: prints a line for people.
    """

    executor: Executor[Any]
    models: Mapping[int, nn.Module]
    store: Store
    flops_per_token: TokenCount
    say: Callable[[str], None]


class Profiler:
    """Observes each step. Subclasses override the hooks that they need; this class does nothing."""

    def watched(self, context: ParallelContext) -> ParallelContext:
        """Return the context with groups whose calls this profiler observes."""
        return context

    def begin(self, run: ProfiledRun) -> None:
        """Called with the run before its first step."""

    def over_step(self, iteration: int) -> AbstractContextManager[None]:
        """Return a context manager around a step, from reading its samples until its metrics are known."""
        return nullcontext()

    def acted(self, action: Action, seconds: float) -> None:
        """Called after an action of the executor, which took `seconds` without waits for other stages."""

    def phase_ends(self, name: str) -> None:
        """Called at the end of a phase of the timers."""

    def conclude(self) -> None:
        """Report on the training at its end; every rank calls this."""
