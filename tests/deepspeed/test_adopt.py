"""Finding this rank's place where a script may have joined the world, or brings an mpu.

Real processes do so in tests/deepspeed/test_initialize.py.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megazero.deepspeed.comm import adopt
from megazero.deepspeed.comm.adopt import find_context
from megazero.deepspeed.comm.mpu import DeepSpeedMpu
from megazero.errors import ConfigError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.torch_group import TorchGroup, joined_world
from tests.forks import run_ranks
from tests.tables import over_table


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Without a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


class Mpu:
    """DeepSpeed's contract, of one process."""

    def __init__(self, size: int = 1, rank: int = 0):
        self.size, self.rank = size, rank

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_rank(self) -> int:
        return self.rank


def test_a_context_is_taken_as_it_is():
    context = solo_context()
    assert find_context(context) is context
    assert find_context(DeepSpeedMpu(context)) is context


def test_a_context_answers_the_contract():
    context = thread_context(ThreadWorld(4), ProcessGrid(dp=2, tp=2), 3)
    mpu = DeepSpeedMpu(context)
    assert mpu.get_model_parallel_rank() == mpu.get_tensor_model_parallel_rank() == 1
    assert mpu.get_data_parallel_rank() == 1
    assert mpu.get_data_parallel_world_size() == 2
    assert mpu.get_pipeline_model_parallel_world_size() == 1
    assert mpu.get_data_parallel_group() is context.replica


def test_without_a_launcher_this_is_a_job_of_one():
    assert find_context().world_size == 1
    assert find_context(Mpu(), may_start=False).tp.size == 1


def test_the_sizes_of_an_mpu_must_fit_the_world():
    with pytest.raises(ConfigError, match="`world size` must be a multiple"):
        find_context(Mpu(size=2))


def test_an_mpu_that_places_the_rank_elsewhere_is_refused():
    with pytest.raises(ConfigError, match="has tensor-parallel rank 0, but it says 1"):
        find_context(Mpu(rank=1))


def test_a_world_that_may_not_be_joined(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="`dist_init_required` must be true"):
        find_context(may_start=False)


def test_a_second_partition_needs_as_many_replicas():
    with pytest.raises(ConfigError, match="must divide the data-parallel x context-parallel ranks"):
        find_context(node_size=2)


@pytest.mark.parametrize(("backend", "started"), [(None, "gloo"), ("gloo", "gloo")])
def test_the_world_is_started_with_the_backend_that_is_named(monkeypatch, backend, started):
    class Started(Exception):
        pass

    def start_world(*arguments):
        raise Started(*arguments)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(adopt, "start_world", start_world)
    monkeypatch.setattr(adopt, "choose_device", lambda wanted, local: torch.device("cpu"))
    with pytest.raises(Started) as caught:
        find_context(backend=backend, timeout=timedelta(minutes=3))
    assert caught.value.args == (started, 1, 2, timedelta(minutes=3))


def test_ranks_on_the_cpu_do_not_talk_through_nccl():
    with pytest.raises(ConfigError, match="`dist_backend` must be gloo for ranks on the CPU, but is nccl"):
        adopt.init_distributed("nccl")


def test_a_plain_process_joins_a_world_of_one(monkeypatch):
    """DeepSpeed looks for mpi4py there, and fails without it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    adopt.init_distributed()
    assert joined_world() == (0, 1)
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["0", "1", "0"]
    adopt.init_distributed(dist_init_required=False)  # has been joined


def test_a_process_lets_go_of_its_groups_when_it_ends():
    """About one job in ten was aborted after its last line, because threads of a group were still running."""
    code = """
import atexit
import deepspeed, torch
from megazero.deepspeed.comm.adopt import leave_at_exit
from megazero.mpu.torch_group import TorchGroup, joined_world
model = torch.nn.Linear(2, 2)
atexit.register(lambda: print(joined_world(), group.process_group, flush=True))  # runs after those below
engine, *_ = deepspeed.initialize(model=model, config={"train_batch_size": 2})
group = engine.context.world
assert isinstance(group, TorchGroup), group
"""
    for rank in run_ranks(*[["-c", f"from megazero.deepspeed import install; install(){code}"]] * 2):
        assert (rank.returncode, rank.stdout) == (0, "None None\n"), rank.stderr


class Stages(Mpu):
    """A pipeline of three stages, as `PipelineModule` asks for one."""

    def get_pipe_parallel_world_size(self) -> int:
        return 3


def _adopt_as_on_nccl(rank: int, world_size: int) -> tuple[dict[str, list[str]], list[object], bool]:
    """Adopt a world that a script has joined with a device; first calls by group, and the devices it had."""
    kept, calls, bound = (adopt.choose_backend, TorchGroup._call, dist.new_group), [], []
    gpu, world = torch.device("cuda", rank), dist.group.WORLD

    def call(group, what, *arguments, **more):
        calls.append((group.name, what))
        return kept[1](group, what, *arguments, **more)

    def new_group(*arguments, **more):
        bound.append(world.bound_device_id)
        return kept[2](*arguments, **more)

    adopt.choose_backend, TorchGroup._call, dist.new_group = (lambda *_: "nccl"), call, new_group
    world.bound_device_id = gpu
    try:
        context = find_context(Stages())
    finally:
        adopt.choose_backend, TorchGroup._call, dist.new_group = kept
    firsts = {
        group.name: [what for name, what in calls if name == group.name][:1] for group in _several(context)
    }
    return firsts, bound, world.bound_device_id == gpu


def _several(context):
    return {id(group): group for group in context.groups.values() if group.size > 1}.values()


@pytest.mark.gloo
def test_a_world_with_a_device_is_adopted_by_calls_of_all_members(pool):
    """A pipeline with a tied layer hung in its constructor: the first call over its stages was a batch
    of messages between two of them. And torch splits a world that has a device, which all ranks must do,
    while only the end stages open the group of a tied weight.
    """
    for firsts, bound, kept in pool.run(_adopt_as_on_nccl, 3):
        assert "pp" in firsts or "world" in firsts
        assert set(map(tuple, firsts.values())) == {("all_reduce",)}
        assert set(bound) <= {None}
        assert kept
    assert bound, "the end stages open a group"


def test_after_an_error_a_process_waits_for_no_group(monkeypatch):
    monkeypatch.setattr(sys, "last_type", OSError, raising=False)
    monkeypatch.setattr(adopt, "leave_world", lambda: pytest.fail("it waits"))
    adopt.leave_at_exit()


def test_an_engine_alone_leaves_torch_with_a_world():
    find_context()
    assert joined_world() == (0, 1)


def test_mpi_says_the_place_of_a_rank(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    started = []
    for name, text in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", text)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(adopt, "start_world", lambda *arguments: started.append(arguments))
    adopt.init_distributed(distributed_port=1234)
    assert started == [("gloo", 1, 2, timedelta(minutes=10))]
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert [os.environ[name] for name in ("MASTER_PORT", "RANK", "WORLD_SIZE")] == ["1234", "1", "2"]


def test_mpi_on_several_hosts_needs_the_first_one(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, text in {"RANK": "1", "SIZE": "2", "LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", text)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ConfigError, match="`MASTER_ADDR` must name the host of rank 0 for 2 ranks"):
        adopt.init_distributed()


@over_table(("text", "minutes"), [("", 10), ("1.5", 1.5), ("30", 30)])
def test_the_longest_wait_is_a_variable(monkeypatch, text, minutes):
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", text)
    assert adopt.default_timeout() == timedelta(minutes=minutes)


@over_table("text", ["soon", "0", "-1", "nan"])
def test_a_wait_that_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", text)
    with pytest.raises(ConfigError, match="`DEEPSPEED_TIMEOUT` must be a number of minutes above 0"):
        adopt.default_timeout()
