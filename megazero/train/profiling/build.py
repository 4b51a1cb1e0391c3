"""Chooses the profilers of a run by its settings."""

from __future__ import annotations

from pathlib import Path

from megazero.config.tree.config import Config
from megazero.mpu.context import ParallelContext
from megazero.train.observe.profiler import Profiler
from megazero.train.profiling.breakdown import Breakdown
from megazero.train.profiling.clock import clock_of
from megazero.train.profiling.comms import CommsLog
from megazero.train.profiling.files import Folder
from megazero.train.profiling.parts import Part, Profilers


def profiler_of(config: Config, context: ParallelContext) -> Profiler:
    """The profilers that the settings ask for, as one; without any, one that does nothing.

    Args:
        config: the run's configuration.
        context: the ranks. Profilers talk over its groups, and so do not see themselves.
    """
    # One that takes time after a step is around those that time it.
    parts: list[Part] = []
    logging, profiling = config.logging, config.profiling
    folder = Folder(Path(profiling.profile_dir), profiling.chosen(context.rank))
    if profiling.memory_timeline_step is not None:
        from megazero.train.profiling.memory.record import MemoryTimeline

        parts.append(MemoryTimeline(profiling.memory_timeline_step, folder, context))
    if profiling.record_memory_history and context.device.type == "cuda":
        from megazero.train.profiling.memory.record import AllocatorHistory

        path = profiling.memory_snapshot_path
        parts.append(AllocatorHistory(path, logging.log_interval, context))
    if profiling.flops_profiler:
        from megazero.train.profiling.flops.native import FlopsProfile

        parts.append(FlopsProfile(config, context))
    if profiling.profile:
        from megazero.train.profiling.traces import TraceWindow

        parts.append(TraceWindow(profiling, folder, context.rank, context.device))
    if logging.comms_logger:
        parts.append(CommsLog(context, logging, folder, clock_of(context.device)))
    if logging.breakdown_level:
        parts.append(Breakdown(context, logging, clock_of(context.device)))
    return Profilers(tuple(parts)) if parts else Profiler()
