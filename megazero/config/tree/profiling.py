"""The section `profiling`: traces, FLOPs by module and memory over time of single steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from megazero.config.condition import config, here
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role

_TRACES = here.profile | here.memory_timeline_step | config.logging.comms_logger
_UNTRACED = _TRACES.because("no step is traced")

Depth = Annotated[int, Field(ge=-1)]
"""A depth in the tree of modules; -1 is down to its leaves."""

RankOrAll = Annotated[int, Field(ge=-1)]
"""A rank of the world; -1 stands for all of them."""


class ProfilingConfig(Section):
    """Profiling"""

    roles = Role.QUIET

    profile_dir: str = option("profile", roles=Role.OUTPUT)
    """folder of traces, pictures and tables, which is made if need be"""
    profile_ranks: tuple[RankOrAll, ...] = option((0,), idle_without=_UNTRACED)
    """ranks that write traces, pictures and tables of communication; -1 for all"""
    profile: bool = option(False)
    """trace steps with torch's profiler, one file per step and rank"""
    profile_step_start: NonNegativeInt = option(10, unit="iterations", idle_without=_UNTRACED)
    """the iteration after which the trace begins"""
    profile_step_end: PositiveInt = option(12, unit="iterations", idle_without=_UNTRACED)
    """the last iteration that is traced"""
    profile_max_mb: PositiveInt = option(500, needs=here.profile, unit="MB")
    """a rank traces no further step once its files have this size"""
    pytorch_profiler_collect_shapes: bool = option(False, needs=here.profile)
    """traces have the shapes of operators' inputs"""
    pytorch_profiler_collect_callstack: bool = option(False, needs=here.profile)
    """traces have the lines of code that called each operator"""
    memory_timeline_step: PositiveInt | None = option(None, unit="iterations")
    """the iteration whose memory is drawn over time, by what it holds"""
    record_memory_history: bool = option(False)
    """keep the history of CUDA's allocator, and write it at every `--log-interval`"""
    memory_snapshot_path: str = option("snapshot.pickle", roles=Role.OUTPUT, needs=here.record_memory_history)
    """file of that history, to whose name each rank adds its number"""
    flops_profiler: bool = option(
        False,
        needs=(
            config.acceleration.compile.is_off.because("what is compiled has no modules within it"),
            config.acceleration.cuda_graph.is_off.because("a graph runs without its modules"),
        ),
    )
    """print parameters, MACs and forward time of each module once"""
    flops_profiler_step: PositiveInt = option(1, needs=here.flops_profiler)
    """the iteration that is counted; the one after it is timed"""
    flops_profiler_module_depth: Depth = option(-1, needs=here.flops_profiler)
    """depth down to which modules are listed; -1 for all"""
    flops_profiler_top_modules: PositiveInt = option(1, needs=here.flops_profiler)
    """types of modules that are named at each depth"""
    flops_profiler_detailed: bool = option(True, needs=here.flops_profiler)
    """list all modules"""
    flops_profiler_output_file: str | None = option(None, roles=Role.OUTPUT, needs=here.flops_profiler)
    """file for these tables, instead of standard output"""
    flops_profiler_recompute_fwd_factor: NonNegativeFloat = option(0.0, needs=here.flops_profiler)
    """the share of the forward pass that backward computes again"""

    def chosen(self, rank: int) -> bool:
        """Whether `profile_ranks` names a rank."""
        return rank in self.profile_ranks or -1 in self.profile_ranks
