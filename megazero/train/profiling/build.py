"""Chooses the profilers of a run by its settings."""

from __future__ import annotations

from collections.abc import Iterator
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
    parts = tuple(_parts(config, context))
    return Profilers(parts) if parts else Profiler()


def _parts(config: Config, context: ParallelContext) -> Iterator[Part]:
    """The profilers; one that takes time after a step is around those that time it."""
    logging, profiling = config.logging, config.profiling
    folder = Folder(Path(profiling.profile_dir), profiling.chosen(context.rank))
    if profiling.memory_timeline_step is not None:
        from megazero.train.profiling.memory.record import MemoryTimeline

        yield MemoryTimeline(profiling.memory_timeline_step, folder, context)
    if profiling.record_memory_history and context.device.type == "cuda":
        from megazero.train.profiling.memory.record import AllocatorHistory

        yield AllocatorHistory(profiling.memory_snapshot_path, logging.log_interval, context)
    if profiling.flops_profiler:
        from megazero.train.profiling.flops.native import FlopsProfile

        yield FlopsProfile(config, context)
    if profiling.profile:
        from megazero.train.profiling.traces import TraceWindow

        yield TraceWindow(profiling, folder, context.rank, context.device)
    if logging.comms_logger:
        yield CommsLog(context, logging, folder, clock_of(context.device))
    if logging.breakdown_level:
        yield Breakdown(context, logging, clock_of(context.device))
