"""What the groups of a job go over, told alike by all ranks."""

from __future__ import annotations

import pytest
import torch

from megazero.config.tree.parallel import ParallelConfig
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch, close_groups, open_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.transports import transports
from megazero.mpu.wrapping_group import WrappingGroup


def test_ranks_as_threads_and_a_rank_alone():
    world, grid = ThreadWorld(4), ProcessGrid(tp=2, dp=2)
    for told in world.run(lambda rank: transports(thread_context(world, grid, rank))):
        assert told["tp"] == told["data"] == told["world"] == "one process"
        assert "pp" not in told
    assert transports(solo_context()) == {}


def _told(rank: int, world_size: int, backend: str) -> dict[str, str]:
    config = ParallelConfig(tensor_model_parallel_size=2, distributed_backend=backend)
    context = open_context(config, Launch(rank, world_size, rank), torch.device("cpu"), wrap=WrappingGroup)
    told = transports(context)
    close_groups(context)
    return {name: told[name] for name in ("tp", "world")}


@pytest.mark.gloo
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_ranks_as_processes(pool, backend):
    assert pool.run(_told, 4, backend) == [{"tp": "gloo", "world": "gloo"}] * 4
