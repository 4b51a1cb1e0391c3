"""The section of the tree about looking into single steps: traces, FLOPs by module, memory over time."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from megazero.config.condition import config, here
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role

_TRACES = here.profile | here.memory_timeline_step | config.logging.comms_logger
_UNTRACED = _TRACES.because("no step is traced")

Depth = Annotated[int, Field(ge=-1)]
"""How far down a tree: -1 is to its leaves."""

RankOrAll = Annotated[int, Field(ge=-1)]
"""A rank of the world; -1 stands for all of them."""


class ProfilingConfig(Section):
    """Profiling"""

    roles = Role.QUIET

    profile_dir: str = option("profile", "folder of traces, pictures and tables, which is made if need be")
    profile_ranks: tuple[RankOrAll, ...] = option(
        (0,),
        "ranks that write traces, pictures and tables of communication; -1 for all",
        idle_without=_UNTRACED,
    )
    profile: bool = option(False, "trace steps with torch's profiler, one file per step and rank")
    profile_step_start: NonNegativeInt = option(
        10, "the iteration after which the trace begins", unit="iterations", idle_without=_UNTRACED
    )
    profile_step_end: PositiveInt = option(
        12, "the last iteration that is traced", unit="iterations", idle_without=_UNTRACED
    )
    profile_max_mb: PositiveInt = option(
        500, "a rank traces no further step once its files have this size", needs=here.profile, unit="MB"
    )
    pytorch_profiler_collect_shapes: bool = option(
        False, "traces have the shapes of operators' inputs", needs=here.profile
    )
    pytorch_profiler_collect_callstack: bool = option(
        False, "traces have the lines of code that called each operator", needs=here.profile
    )
    memory_timeline_step: PositiveInt | None = option(
        None, "the iteration whose memory is drawn over time, by what it holds", unit="iterations"
    )
    record_memory_history: bool = option(
        False, "keep the history of CUDA's allocator, and write it at every `--log-interval`"
    )
    memory_snapshot_path: str = option(
        "snapshot.pickle",
        "file of that history, to whose name each rank adds its number",
        needs=here.record_memory_history,
    )
    flops_profiler: bool = option(
        False,
        "print parameters, MACs and forward time of each module once",
        needs=(
            config.acceleration.compile.is_off.because("what is compiled has no modules within it"),
            config.acceleration.cuda_graph.is_off.because("a graph runs without its modules"),
        ),
    )
    flops_profiler_step: PositiveInt = option(
        1, "the iteration that is counted; the one after it is timed", needs=here.flops_profiler
    )
    flops_profiler_module_depth: Depth = option(
        -1, "depth down to which modules are listed; -1 for all", needs=here.flops_profiler
    )
    flops_profiler_top_modules: PositiveInt = option(
        1, "types of modules that are named at each depth", needs=here.flops_profiler
    )
    flops_profiler_detailed: bool = option(
        True, "list all modules", flag="--no-flops-profiler-detailed", needs=here.flops_profiler
    )
    flops_profiler_output_file: str | None = option(
        None, "file for these tables, instead of standard output", needs=here.flops_profiler
    )
    flops_profiler_recompute_fwd_factor: NonNegativeFloat = option(
        0.0, "the share of the forward pass that backward computes again", needs=here.flops_profiler
    )

    def chosen(self, rank: int) -> bool:
        """Whether `profile_ranks` names a rank."""
        return rank in self.profile_ranks or -1 in self.profile_ranks
