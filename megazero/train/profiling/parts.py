"""The base class of the profilers here, and the one that passes everything on to those of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from megazero.mpu.context import ParallelContext
from megazero.pipeline.actions import Action
from megazero.train.observe.profiler import Profiler, TokenCount
from megazero.train.profiling.group import Listener, observed
from megazero.train.step.engine import Engine


class Part(Profiler):
    """A profiler that may also see each action of the executor, and calls of groups if it is a `Listener`."""

    sees_actions = False

    def acted(self, action: Action, seconds: float) -> None:
        """The executor has carried out an action, in so many seconds without waits for other stages."""


class Profilers(Profiler):
    """Several profilers as one.

    Args:
        parts: these, in the order in which their contexts are entered.
    """

    def __init__(self, parts: Sequence[Part]):
        self.parts = tuple(parts)

    def watched(self, context: ParallelContext) -> ParallelContext:
        listeners = [part for part in self.parts if isinstance(part, Listener)]
        return observed(context, listeners) if listeners else context

    def begin(self, engine: Engine, say: Callable[[str], None], flops_per_token: TokenCount) -> None:
        for part in self.parts:
            part.begin(engine, say, flops_per_token)
        seeing = [part for part in self.parts if part.sees_actions]
        if not seeing:
            return

        def acted(action: Action, seconds: float) -> None:
            for part in seeing:
                part.acted(action, seconds)

        engine.executor.observer = acted

    @contextmanager
    def over_step(self, iteration: int) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.over_step(iteration))
            yield

    def phase_ends(self, name: str) -> None:
        for part in self.parts:
            part.phase_ends(name)

    def conclude(self) -> None:
        for part in self.parts:
            part.conclude()
