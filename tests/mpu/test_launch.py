"""Joining and leaving a job."""

from __future__ import annotations

import weakref
from datetime import timedelta
from unittest.mock import MagicMock

import pytest
import torch

from megazero.config.tree.parallel import ParallelConfig
from megazero.errors import ConfigError
from megazero.mpu import launch
from megazero.mpu.launch import Launch, choose_device, join, leave
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.torch_group import TorchGroup


def test_without_a_launcher_this_is_a_job_of_one():
    assert Launch.from_environment({}) == Launch(0, 1, 0)
    assert Launch.from_environment({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == Launch(5, 8, 1)


def test_a_script_under_srun_has_the_number_that_slurm_gives_it(cuda):
    """Scripts that set RANK alone once trained on GPU 0, all ranks of a machine."""
    job = {"RANK": "5", "WORLD_SIZE": "8", "SLURM_LOCALID": "1"}
    assert Launch.from_environment(job) == Launch(5, 8, 1)
    assert Launch.from_environment({**job, "LOCAL_RANK": "2"}) == Launch(5, 8, 2)
    assert Launch.from_environment({"SLURM_LOCALID": "1"}) == Launch(0, 1, 0), "a step within an allocation"
    unknown = Launch.from_environment({"RANK": "5", "WORLD_SIZE": "8"})
    assert unknown == Launch(5, 8, None)
    cuda(1)
    assert choose_device("auto", unknown.local_rank) == torch.device("cuda", 0)
    cuda(8)
    with pytest.raises(ConfigError, match=r"`LOCAL_RANK` must say which of 8 CUDA devices is this process's"):
        choose_device("auto", unknown.local_rank)


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


@pytest.fixture
def cuda(monkeypatch):
    """A machine that shows this process a number of GPUs; the fixture's value sets it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(("count", "local_rank", "index"), [(8, 0, 0), (8, 7, 7), (1, 0, 0), (1, 7, 0)])
def test_a_rank_has_the_gpu_of_its_number_or_the_only_one_that_it_sees(cuda, count, local_rank, index):
    """SLURM with --gpus-per-task=1 shows each of eight local ranks one GPU; the other seven were refused."""
    cuda(count)
    assert choose_device("auto", local_rank) == torch.device("cuda", index)


def test_more_ranks_than_gpus_are_refused(cuda):
    cuda(4)
    with pytest.raises(ConfigError, match=r"below the number of CUDA devices \(4\), but is 4; start fewer"):
        choose_device("cuda", 4)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_watch_marks_the_streams_of_nccl_alone(monkeypatch, backend):
    """Calls over Gloo are done when they return."""
    made = []

    class Seen(Exception):
        pass

    def watch(*args, new_mark, **kwargs):
        made.append(new_mark)
        raise Seen

    for name in ("start_world", "StoreJobNotes"):
        monkeypatch.setattr(launch, name, MagicMock())
    monkeypatch.setattr(launch, "choose_backend", lambda wanted, device: backend)
    monkeypatch.setattr(launch, "Watch", watch)
    with pytest.raises(Seen):
        join(ParallelConfig(device="cpu"), Launch(0, 2, 0))
    assert made == [torch.cuda.Event if backend == "nccl" else None]


@pytest.mark.parametrize(("backend", "which"), [("nccl", {"device_ids": [3]}), ("gloo", {})])
def test_a_barrier_over_nccl_names_its_device(monkeypatch, backend, which):
    """Else torch warns, and takes the device of the rank's number, which may be another rank's."""
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.distributed, "barrier", lambda **given: asked.append(given))
    handle = object()
    TorchGroup("tp", 0, (0, 1), handle).barrier()
    assert asked == [{"group": handle, **which}]


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


def _reduced_in_tiers(rank: int, world_size: int) -> tuple[list[int], list[float]]:
    from megazero.mpu import tree
    from megazero.mpu.context import host_groups, make_context
    from megazero.mpu.grid import ProcessGrid
    from megazero.mpu.torch_group import open_group

    fan, tree.FAN = tree.FAN, 2

    def opened(name, ranks):
        return open_group(name, rank, ranks, timedelta(seconds=30), backend="gloo")

    try:
        context = make_context(ProcessGrid(dp=world_size), rank, torch.device("cpu"), opened, host=opened)
    finally:
        tree.FAN = fan
    numbers = torch.tensor([float(rank), -float(rank)])
    for group in host_groups(context):
        group.all_reduce(numbers, "max").wait()
    launch.close_groups(context)
    return [group.size for group in host_groups(context)], numbers.tolist()


@pytest.mark.gloo
def test_groups_on_the_host_reach_all_ranks_in_tiers(pool):
    """One group of all ranks of a large job would be a connection from each to each."""
    assert pool.run(_reduced_in_tiers, 4) == [([2, 2], [3.0, 0.0])] * 4
