"""Joining and leaving a job."""

from __future__ import annotations

import weakref
from datetime import timedelta

import pytest
import torch

from megazero.config.tree.parallel import ParallelConfig
from megazero.errors import ConfigError
from megazero.mpu import launch
from megazero.mpu.launch import Launch, choose_device, join, leave
from megazero.mpu.solo_group import SoloGroup


def test_without_a_launcher_this_is_a_job_of_one():
    assert Launch.from_environment({}) == Launch(0, 1, 0)
    assert Launch.from_environment({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == Launch(5, 8, 1)


@pytest.mark.parametrize(
    ("environment", "words"),
    [({"RANK": "two"}, "`RANK` must be a number"), ({"RANK": "3", "WORLD_SIZE": "3"}, "below WORLD_SIZE")],
)
def test_a_broken_environment_is_refused(environment, words):
    with pytest.raises(ConfigError, match=words):
        Launch.from_environment(environment)


def test_cuda_is_refused_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    with pytest.raises(ConfigError, match="--device cpu"):
        choose_device("cuda", 0)
    assert choose_device("auto", 3) == torch.device("cpu")


def test_nccl_is_refused_with_a_remedy_where_it_cannot_be():
    """torch says only "Distributed package doesn't have NCCL built in"."""
    with pytest.raises(ConfigError, match=r"must be gloo or auto here, but is nccl.*leave `--distributed-"):
        launch.choose_backend("nccl", torch.device("cpu"))
    assert launch.choose_backend("auto", torch.device("cpu")) == "gloo"


def test_a_job_of_one_needs_no_world():
    context = join(ParallelConfig(), Launch())
    assert {group.size for group in context.groups.values()} == {1}
    leave(context)


def _leave_with_a_group_still_held(rank: int, world_size: int) -> bool:
    """A process group that outlived `leave` once aborted one exit in ten: its threads ran until the end."""
    from datetime import timedelta

    from megazero.mpu.context import make_context
    from megazero.mpu.grid import ProcessGrid
    from megazero.mpu.torch_group import open_group

    context = make_context(
        ProcessGrid(dp=world_size // 2, tp=2),
        rank,
        torch.device("cpu"),
        lambda name, ranks: open_group(name, rank, ranks, timedelta(seconds=30)),
    )
    handles = [weakref.ref(group.process_group) for group in context.groups.values() if group.size > 1]
    leave(context)
    return bool(handles) and all(handle() is None for handle in handles)


@pytest.mark.gloo
def test_leaving_ends_the_process_groups_though_the_context_lives(pool):
    assert pool.run(_leave_with_a_group_still_held, 4) == [True] * 4


def test_groups_give_up_a_minute_later_than_the_watch(monkeypatch):
    """So the one that tells who is missing speaks first."""
    asked = []

    def opened(name, rank, ranks, timeout, **options):
        asked.append((name, timeout))
        return SoloGroup(name, rank)

    monkeypatch.setattr(launch, "open_group", opened)
    config = ParallelConfig(
        tensor_model_parallel_size=2, distributed_timeout_minutes=7, distributed_backend="gloo"
    )
    launch.open_context(config, Launch(1, 2, 1), torch.device("cpu"))
    assert "tp" in dict(asked)
    assert set(dict(asked).values()) == {timedelta(minutes=8)}
