"""`PipelineParallelGrid`: a rank's coordinates in a topology and its groups, by DeepSpeed's names."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.deepspeed.comm.adopt import find_context
from megazero.deepspeed.comm.mpu import Mpu
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
class _TopologyMpu:
    """A topology as an `mpu` for `find_context`."""

    topology: ProcessTopology

    def get_tensor_model_parallel_world_size(self) -> int:
        return max(1, self.topology.get_dim("model"))

    def get_pipeline_model_parallel_world_size(self) -> int:
        return max(1, self.topology.get_dim("pipe"))


def context_of(topology: ProcessTopology) -> ParallelContext:
    """This rank's context in a world of this topology; joins the world if necessary.

    Raises:
        ConfigError: the topology has another size than the world, or its axes are not pipe, data and model,
            in this order.
    """
    names = topology.get_axis_names()
    if names != [axis for axis in _AXES if axis in names] or "pipe" not in names:
        raise ConfigError(
            f"the axes of `topology` must be pipe, data and model, in this order, but are "
            f"{', '.join(names)}; use PipeDataParallelTopology or PipeModelDataParallelTopology"
        )
    context = find_context(_TopologyMpu(topology))
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


class _GridBase:
    """A rank and its coordinates in a topology."""

    context: ParallelContext
    global_rank: int
    _topo: ProcessTopology

    def _is_grid_valid(self) -> bool:
        """Whether the topology has the size of the world."""
        return self._topo.world_size() == self.context.world_size

    def topology(self) -> ProcessTopology:
        """The topology."""
        return self._topo

    def get_global_rank(self) -> int:
        """This rank."""
        return self.global_rank

    def _coordinate(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def _size(self, axis: str) -> int:
        return max(1, self._topo.get_dim(axis))


class _PipeAxis(_GridBase):
    """The members of a grid for the axis of stages."""

    def get_stage_id(self) -> int:
        """This rank's stage."""
        return self._coordinate("pipe")

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank at another stage; other coordinates are this rank's unless `kwargs` has them."""
        coordinates = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        return self._topo.get_rank(**coordinates._asdict())

    def get_pipe_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.get_stage_id()

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages."""
        return self._size("pipe")

    def get_pipe_parallel_group(self) -> Group:
        """The group of this pipeline's ranks."""
        return self.context.pp

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group


class _DataAxis(_GridBase):
    """The members of a grid for the axis of pipelines."""

    def get_data_parallel_id(self) -> int:
        """The number of this rank's pipeline."""
        return self._coordinate("data")

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """The number of pipelines."""
        return self._size("data")

    def get_data_parallel_group(self) -> Group:
        """The group of this stage's ranks in all pipelines."""
        return self.context.replica

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The world ranks of this group."""
        return list(self.context.replica.ranks)


class _ModelAxis(_GridBase, Mpu):
    """The members of a grid for the tensor-parallel axis, and for the ranks of a whole model."""

    def get_slice_parallel_rank(self) -> int:
        """This rank among the tensor-parallel ranks."""
        return self._coordinate("model")

    def get_slice_parallel_world_size(self) -> int:
        """The number of tensor-parallel ranks."""
        return self._size("model")

    def get_slice_parallel_group(self) -> Group:
        """The group of tensor-parallel ranks."""
        return self.context.tp

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group

    def get_model_parallel_rank(self) -> int:
        """This rank among the ranks of one whole model: all its stages and slices."""
        return self.context.model.rank

    def get_model_parallel_world_size(self) -> int:
        """The number of ranks of one whole model."""
        return self.context.model.size

    def get_model_parallel_group(self) -> Group:
        """The group of the ranks of one whole model."""
        return self.context.model


class PipelineParallelGrid(_PipeAxis, _DataAxis, _ModelAxis):
    """A rank's coordinates and groups.

    Args:
        topology: the coordinates of all ranks, by default `default_topology`; or a `ParallelContext`.
        process_group: has no effect; the grid spans the world.

    Raises:
        ConfigError: see `context_of`.
    """

    def __init__(
        self, topology: ProcessTopology | ParallelContext | None = None, process_group: object = None
    ):
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
        # DeepSpeed's attributes for the groups, and for the ranks of all groups.
        self.ds_model_proc_group, self.ds_model_rank = context.model, context.model.rank
        self.ds_model_world_size = context.model.size
        self.dp_groups, self.dp_group = topo.get_axis_comm_lists("data"), list(context.replica.ranks)
        self.pipe_groups, self.pp_group = topo.get_axis_comm_lists("pipe"), list(context.pp.ranks)
        self.slice_group = list(context.tp.ranks)
        self.dp_proc_group, self.pp_proc_group = context.replica, context.pp
        self.slice_proc_group = context.tp
        pipelines = {rank: ranks for ranks in self.pipe_groups for rank in ranks}
        self.p2p_groups = [
            [rank, ranks[(ranks.index(rank) + 1) % len(ranks)]] for rank, ranks in sorted(pipelines.items())
        ]
