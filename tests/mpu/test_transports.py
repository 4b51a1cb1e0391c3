"""What the groups of a job go over, told alike by all ranks."""

from __future__ import annotations

import warnings

import pytest
import torch

from megazero.config.tree.parallel import ParallelConfig
from megazero.mpu import shared_open
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


def _told(rank: int, world_size: int, lacking: int | None, backend: str) -> dict[str, str]:
    """With shared memory, but for one rank."""
    native = shared_open.NATIVE
    try:
        shared_open.NATIVE = None if rank == lacking else native
        config = ParallelConfig(tensor_model_parallel_size=2, distributed_backend=backend)
        launch = Launch(rank, world_size, rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context = open_context(config, launch, torch.device("cpu"), wrap=WrappingGroup)
        told = transports(context)
        close_groups(context)
        return {name: told[name] for name in ("tp", "world")}
    finally:
        shared_open.NATIVE = native


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("lacking", "backend", "tp", "world"),
    [
        (None, "auto", "shared memory", "shared memory"),
        (3, "auto", "gloo and shared memory", "gloo"),
        (None, "gloo", "gloo", "gloo"),
    ],
)
def test_ranks_as_processes(pool, lacking, backend, tp, world):
    pytest.importorskip("megazero.mpu._native", reason="the shared memory of csrc/mpu is not built")
    assert pool.run(_told, 4, lacking, backend) == [{"tp": tp, "world": world}] * 4
