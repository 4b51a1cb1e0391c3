"""Where ranks sit; the checks hold each method against DeepSpeed's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megazero.deepspeed.pipe.grid import PipelineParallelGrid, context_of
from megazero.deepspeed.pipe.model import PipelineModule
from megazero.deepspeed.pipe.ties import TieGroup
from megazero.deepspeed.pipe.topology import (
    PipeModelDataParallelTopology,
    ProcessTopology,
    default_topology,
)
from megazero.errors import ConfigError
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.deepspeed.pipe.models import on_stages
from tests.tables import over_table


def test_our_grid_places_ranks_as_the_topology_does():
    sizes = {"pp": 2, "dp": 2, "tp": 2}
    world = ThreadWorld(8, timeout=30.0)
    grids = world.run(lambda rank: PipelineParallelGrid(thread_context(world, ProcessGrid(**sizes), rank)))
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    for rank, grid in enumerate(grids):
        place = topology.get_coord(rank)
        assert grid.topology().mapping == topology.mapping
        mine = grid.context
        ranks = (mine.pp.rank, mine.data.rank, mine.tp.rank)
        assert ranks == (place.pipe, place.data, place.model)
        assert list(grid.get_pipe_parallel_group().ranks) == list(grid.pp_group)
        assert grid.pp_group in topology.get_axis_comm_lists("pipe")
        assert grid.dp_group in topology.get_axis_comm_lists("data")
        assert grid.slice_group in topology.get_axis_comm_lists("model")


@over_table(
    ("ranks", "dims"), [(1, [1, 1]), (2, [2, 1]), (6, [2, 3]), (8, [4, 2]), (12, [6, 2]), (7, [7, 1])]
)
def test_without_a_topology_prime_factors_go_to_stages_and_replicas_in_turn(ranks, dims):
    assert default_topology(ranks).dims == dims


@over_table("axes", [["data", "pipe"], ["x"], ["pipe", "data", "tensor"], ["data"]])
def test_axes_that_our_groups_do_not_have_are_refused(axes):
    with pytest.raises(
        ConfigError, match="the axes of `topology` must be pipe, data and model, in this order"
    ):
        context_of(ProcessTopology(axes, [1] * len(axes)))


def test_a_topology_is_as_large_as_the_world():
    with pytest.raises(ConfigError, match="must be a multiple of"):
        PipelineModule([nn.Linear(2, 2)], topology=ProcessTopology(["pipe", "data"], [2, 1]))
    with pytest.raises(ConfigError, match=r"as many ranks as the world \(1\), but has 2"):
        PipelineModule([nn.Linear(2, 2)], topology=ProcessTopology(["pipe", "data"], [1, 2]))


@over_table("stages", [[0, 3], [1, 2, 3], [0, 1, 2, 3]])
def test_a_tie_group_sums_and_copies_over_some_stages(stages):
    def work(context):
        if context.pp.rank not in stages:
            return None
        group, value = TieGroup(context.pp, stages), torch.full((3,), 10.0**context.pp.rank)
        first = value.clone()
        group.sum(value)
        group.broadcast(first)
        return value[0].item(), first[0].item(), group.rank, group.size, group.ranks

    total, first = sum(10.0**stage for stage in stages), 10.0 ** stages[0]
    expected = {stage: (total, first, i, len(stages), tuple(stages)) for i, stage in enumerate(stages)}
    assert on_stages(4, 1, work) == [expected.get(stage) for stage in range(4)]
