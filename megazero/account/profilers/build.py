"""Build the profilers that a run's settings ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megazero.account.profiler import ProfiledRun, Profiler
from megazero.account.profilers.breakdown import Breakdown
from megazero.account.profilers.clock import clock_of
from megazero.account.profilers.comms import CommsLog
from megazero.account.profilers.files import Folder
from megazero.account.profilers.group import Listener, observed
from megazero.config.tree.config import Config
from megazero.mpu.context import ParallelContext
from megazero.pipeline.actions import Action


def profiler_of(config: Config, context: ParallelContext) -> Profiler:
    """Build the profilers that the settings ask for, as one; without any, one that does nothing.

    Args:
        config: the run's configuration.
        context: the ranks' groups, without observers, so that profilers do not observe their own calls.
    """
    # A profiler that works after a step is outside of those that time the step.
    parts: list[Profiler] = []
    logging, profiling = config.logging, config.profiling
    folder = Folder(Path(profiling.profile_dir), profiling.chosen(context.rank))
    if profiling.memory_timeline_step is not None:
        from megazero.account.profilers.memory_timeline import MemoryTimeline

        parts.append(MemoryTimeline(profiling.memory_timeline_step, folder, context))
    if profiling.record_memory_history and context.device.type == "cuda":
        from megazero.account.profilers.memory_timeline import AllocatorHistory

        path = profiling.memory_snapshot_path
        parts.append(AllocatorHistory(path, logging.log_interval, context))
    if profiling.flops_profiler:
        from megazero.account.profilers.flops.native import FlopsProfile

        parts.append(FlopsProfile(config, context))
    if profiling.profile:
        from megazero.account.profilers.traces import TraceWindow

        parts.append(TraceWindow(profiling, folder, context.rank, context.device))
    if logging.comms_logger:
        parts.append(CommsLog(context, logging, folder, clock_of(context.device)))
    if logging.breakdown_level:
        parts.append(Breakdown(context, logging, clock_of(context.device)))
    return Profilers(parts) if parts else Profiler()


class Profilers(Profiler):
    """Several profilers as one; those that are `Listener` observe the calls of groups.

    Args:
        parts: the profilers, in the order in which their contexts are entered.
    """

    def __init__(self, parts: Sequence[Profiler]):
        self.parts = tuple(parts)

    def watched(self, context: ParallelContext) -> ParallelContext:
        listeners = [part for part in self.parts if isinstance(part, Listener)]
        return observed(context, listeners) if listeners else context

    def begin(self, run: ProfiledRun) -> None:
        for part in self.parts:
            part.begin(run)
        run.executor.observer = self.acted

    @contextmanager
    def over_step(self, iteration: int) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.over_step(iteration))
            yield

    def acted(self, action: Action, seconds: float) -> None:
        for part in self.parts:
            part.acted(action, seconds)

    def phase_ends(self, name: str) -> None:
        for part in self.parts:
            part.phase_ends(name)

    def conclude(self) -> None:
        for part in self.parts:
            part.conclude()
