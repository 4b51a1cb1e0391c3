"""`PipelineParallelGrid`: a rank's place in a topology and its groups, under DeepSpeed's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megazero.deepspeed.comm.adopt import find_context
from megazero.deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    default_topology,
)
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group

_AXES = ("pipe", "data", "model")


@dataclass(frozen=True)
class _Sizes:
    """The sizes that `find_context` asks of an `mpu`."""

    topology: ProcessTopology

    def get_tensor_model_parallel_world_size(self) -> int:
        return max(1, self.topology.get_dim("model"))

    def get_pipeline_model_parallel_world_size(self) -> int:
        return max(1, self.topology.get_dim("pipe"))


def context_of(topology: ProcessTopology) -> ParallelContext:
    """This rank's context in a world of this topology, which is joined unless it has been.

    Raises:
        ConfigError: the topology is not as large as the world, or has other axes or another order than
            pipe, data, model.
    """
    names = topology.get_axis_names()
    if names != [axis for axis in _AXES if axis in names] or "pipe" not in names:
        raise ConfigError(
            f"the axes of `topology` must be pipe, data and model, in this order, but are "
            f"{', '.join(names)}; use PipeDataParallelTopology or PipeModelDataParallelTopology"
        )
    context = find_context(_Sizes(topology))
    if context.world_size != topology.world_size():
        raise ConfigError(
            f"`topology` must have as many ranks as the world ({context.world_size}), but has "
            f"{topology.world_size()}; start {topology.world_size()} ranks or change its sizes"
        )
    return context


def topology_of(context: ParallelContext) -> ProcessTopology:
    """The topology of a context."""
    stages, replicas, slices = context.pp.size, context.data.size, context.tp.size
    if slices > 1:
        return PipeModelDataParallelTopology(stages, slices, replicas)
    return PipeDataParallelTopology(stages, replicas)


class _Placed:
    """A rank in a topology."""

    context: ParallelContext
    global_rank: int
    _topo: ProcessTopology

    def _is_grid_valid(self) -> bool:
        """Whether the topology is as large as the world."""
        return self._topo.world_size() == self.context.world_size

    def topology(self) -> ProcessTopology:
        """The topology."""
        return self._topo

    def get_global_rank(self) -> int:
        """This rank."""
        return self.global_rank

    def _at(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def _size(self, axis: str) -> int:
        return max(1, self._topo.get_dim(axis))


class _Stages(_Placed):
    """Which stage this rank is at."""

    def get_stage_id(self) -> int:
        """This rank's stage."""
        return self._at("pipe")

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank at another stage with the same other coordinates, except those that are given."""
        place = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        return self._topo.get_rank(**place._asdict())

    def get_pipe_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.get_stage_id()

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages."""
        return self._size("pipe")

    def get_pipe_parallel_group(self) -> Group:
        """The ranks of this pipeline."""
        return self.context.pp

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group


class _Replicas(_Placed):
    """Which samples this rank reads."""

    def get_data_parallel_id(self) -> int:
        """The number of this rank's pipeline."""
        return self._at("data")

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """The number of pipelines."""
        return self._size("data")

    def get_data_parallel_group(self) -> Group:
        """The ranks of this stage in all pipelines."""
        return self.context.replica

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The numbers of these ranks."""
        return list(self.context.replica.ranks)


class _Slices(_Placed):
    """Which slices of the weights this rank holds."""

    def get_slice_parallel_rank(self) -> int:
        """This rank's number among those that hold slices of the same layers."""
        return self._at("model")

    def get_slice_parallel_world_size(self) -> int:
        """The number of ranks that the layers' weights are sliced over."""
        return self._size("model")

    def get_slice_parallel_group(self) -> Group:
        """These ranks."""
        return self.context.tp

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those that hold one whole model: its stages and slices."""
        return self.context.model.rank

    def get_model_parallel_world_size(self) -> int:
        """The number of ranks that hold one whole model."""
        return self.context.model.size

    def get_model_parallel_group(self) -> Group:
        """These ranks."""
        return self.context.model


class PipelineParallelGrid(_Stages, _Replicas, _Slices):
    """A rank's place and its groups.

    Args:
        topology: where each rank sits; by default the world's prime factors go to stages and replicas in
            turn. A `ParallelContext` is taken as it is.
        process_group: as in DeepSpeed, without effect: the grid spans the world.

    Raises:
        ConfigError: see `context_of`.
    """

    def __init__(self, topology: ProcessTopology | ParallelContext | None = None, process_group: Any = None):
        if topology is None:
            topology = default_topology(find_context().world_size)
        if isinstance(topology, ParallelContext):
            self.context, self._topo = topology, topology_of(topology)
        else:
            self.context, self._topo = context_of(topology), topology
        context, topo = self.context, self._topo
        self.global_rank, self.world_size = context.rank, context.world_size
        self.pipe_parallel_size, self.data_parallel_size = self._size("pipe"), self._size("data")
        self.model_parallel_size = self.slice_parallel_size = self._size("model")
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        # DeepSpeed's names of the groups, and of the lists of all of them.
        self.ds_model_proc_group, self.ds_model_rank = context.model, context.model.rank
        self.ds_model_world_size = context.model.size
        self.dp_groups, self.dp_group = topo.get_axis_comm_lists("data"), list(context.replica.ranks)
        self.pipe_groups, self.pp_group = topo.get_axis_comm_lists("pipe"), list(context.pp.ranks)
        self.slice_group = list(context.tp.ranks)
        self.dp_proc_group, self.pp_proc_group, self.slice_proc_group = (
            context.replica,
            context.pp,
            context.tp,
        )
        line = {rank: ranks for ranks in self.pipe_groups for rank in ranks}
        self.p2p_groups = [
            [rank, line[rank][(line[rank].index(rank) + 1) % len(line[rank])]] for rank in sorted(line)
        ]
