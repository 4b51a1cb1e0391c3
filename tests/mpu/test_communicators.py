"""Which communicators a job opens, what goes over which, and that all of them work before the first step."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from megazero.config.resolve import parse_config
from megazero.config.tree.parallel import ParallelConfig
from megazero.errors import CommunicationError
from megazero.mpu import launch, torch_group
from megazero.mpu.communicators import CommunicatorPlan, second_communicators
from megazero.mpu.context import make_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.group import Group, Transfer, Work
from megazero.mpu.launch import Launch, join
from megazero.mpu.still_group import StillGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.mpu.warm_up import warm_up
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup
from megazero.train.pretraining import pretrain_on
from tests.tables import over_table

GRIDS = (
    ProcessGrid(dp=4),
    ProcessGrid(pp=4, dp=2),
    ProcessGrid(pp=3, dp=2, tp=2),
    ProcessGrid(pp=2, dp=2, cp=2, tp=2, ep=2),
)


@over_table(
    ("pp", "stage", "seconds"),
    [
        (1, 0, ()),
        (2, 0, ()),  # a stage with one neighbour has nothing to keep apart
        (3, 0, ("pp_odd",)),
        (1, 1, ("replica_gather", "expert_replica_gather")),
        (4, 3, ("replica_gather", "expert_replica_gather", "pp_odd")),
    ],
)
def test_second_communicators_are_for_what_overlaps(pp, stage, seconds):
    assert second_communicators(ProcessGrid(pp=pp, dp=2), stage) == seconds


@over_table("node_size", [1, 2])
@over_table("grid", GRIDS)
def test_members_share_a_communicator_s_names_and_have_opened_as_many_before(grid, node_size):
    """Torch names a group after that number, and members with two names for it wait for each other."""
    seconds, before = second_communicators(grid, 1), {}
    for rank in range(grid.world_size):
        opened = 0
        for c in CommunicatorPlan.of(grid, rank, node_size=node_size, seconds=seconds).communicators:
            if len(c.ranks) > 1:
                assert rank in c.ranks
                before.setdefault((c.ranks, c.second), set()).add((opened, c.names))
                opened += len(c.ranks) < grid.world_size or c.second
    assert {len(ways) for ways in before.values()} == {1}


def test_what_runs_beside_computation_is_urgent():
    plan = CommunicatorPlan.of(ProcessGrid(pp=2, dp=2, tp=2), 0)
    assert {c.name: c.urgent for c in plan.communicators if len(c.ranks) > 1} == {
        "pp": True,
        "tp": True,
        "data": True,  # the sums of gradients go over it too
        "stage": False,
        "model": False,
        "world": False,
    }
    assert CommunicatorPlan.of(ProcessGrid(dp=2), 0).named("world").urgent  # it is that of the replicas


def test_there_are_second_groups_where_they_are_asked_for():
    grid, opened = ProcessGrid(pp=4, dp=2), []

    def maker(name: str, ranks: tuple[int, ...]) -> Group:
        opened.append((name, ranks))
        return StillGroup(name, ranks.index(0), ranks)

    def context(seconds: Sequence[str]):
        opened.clear()
        return make_context(grid, 0, torch.device("meta"), maker, seconds=seconds)

    plain = context(())
    before = set(opened)
    assert "replica_gather" not in plain.groups
    full = context(second_communicators(grid, 1))
    assert set(opened) - before == {("replica_gather", range(2)), ("pp_odd", range(0, 8, 2))}
    gathers = full.groups["replica_gather"]
    assert gathers is not full.replica
    assert gathers.ranks == full.replica.ranks
    assert gathers is full.groups["expert_replica_gather"]


class Spied(WrappingGroup):
    """Writes down the operations and the peers of each call."""

    def __init__(self, inner: Group, calls: list[tuple]):
        super().__init__(inner)
        self.calls = calls

    def _collective(self, call: GroupCall) -> Work:
        self.calls.append((self.name, call.operation))
        return super()._collective(call)

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        if transfers:
            self.calls.append((self.name, *((t.kind, t.peer) for t in transfers)))
        return super().exchange(transfers)


def pipeline(stages: int, rank: int, world: ThreadWorld, calls: list[tuple]):
    """The context of a stage whose communicators are spied on."""

    def maker(name: str, ranks: tuple[int, ...]) -> Group:
        return Spied(world.group(name, rank, ranks), calls)

    grid = ProcessGrid(pp=stages)
    return make_context(grid, rank, torch.device("cpu"), maker, seconds=second_communicators(grid, 0))


@over_table("stages", [3, 4, 5])
def test_messages_to_two_neighbours_go_over_two_communicators(stages):
    """In a ring, as chunks make one, all messages arrive; in a line, no stage has both neighbours on one."""
    world = ThreadWorld(stages, timeout=20.0)

    def work(rank: int):
        calls: list[tuple] = []
        context = pipeline(stages, rank, world, calls)
        after, before = (rank + 1) % stages, (rank - 1) % stages
        sent = [torch.full((1,), 10.0 * rank + n) for n in range(2)]
        received = [torch.zeros(1) for _ in range(2)]
        works = context.pp.exchange(
            [
                Transfer("send", sent[0], after, 0),
                Transfer("recv", received[1], after, 1),
                Transfer("recv", received[0], before, 0),
                Transfer("send", sent[1], before, 1),
            ]
        )
        for work in works:
            work.wait()
        over = {peer: name for name, *transfers in calls for _, peer in transfers}
        assert received[0].item() == 10.0 * before
        assert received[1].item() == 10.0 * after + 1
        return over

    over = world.run(work)
    for rank in range(stages - 1):
        assert over[rank][rank + 1] == over[rank + 1][rank] == ("pp", "pp_odd")[rank % 2]
    assert over[0][stages - 1] == over[stages - 1][0]


def test_every_member_of_each_communicator_takes_part_in_its_first_call():
    """NCCL connects then. A stage's first messages would not do: not every one has some for each."""
    stages, world = 4, ThreadWorld(4, timeout=20.0)

    def work(rank: int):
        calls: list[tuple] = []
        context = pipeline(stages, rank, world, calls)
        warm_up(context)
        if rank < 2:
            kind = "send" if rank == 0 else "recv"
            for work in context.pp.exchange([Transfer(kind, torch.zeros(1), 1 - rank, 0)]):
                work.wait()
        return [next(call for call in calls if call[0] == name) for name in ("pp", "pp_odd")]

    assert world.run(work) == [[("pp", "all_reduce"), ("pp_odd", "all_reduce")]] * stages


@over_table("grid", GRIDS)
def test_each_communicator_is_warmed_once(grid):
    opened: list[str] = []
    calls: list[tuple] = []

    def maker(name: str, ranks: tuple[int, ...]) -> Group:
        opened.append(name)
        return Spied(StillGroup(name, ranks.index(0), ranks), calls)

    seconds = second_communicators(grid, 1)
    warm_up(make_context(grid, 0, torch.device("meta"), maker, seconds=seconds))
    assert sorted(calls) == sorted((name, "all_reduce") for name in opened)


class Broken(WrappingGroup):
    def _collective(self, call: GroupCall) -> Work:
        raise CommunicationError("the cable is out")


def broken(name: str, ranks: tuple[int, ...]) -> Group:
    group = StillGroup(name, ranks.index(2), ranks)
    return Broken(group) if name == "tp" else group


def test_a_communicator_that_does_not_work_is_named_with_its_ranks_and_hosts():
    hosts = {2: "node7", 3: None}
    context = make_context(ProcessGrid(tp=2, dp=2), 2, torch.device("meta"), broken)
    with pytest.raises(CommunicationError) as error:
        warm_up(context, hosts.get)
    assert str(error.value) == (
        "the communicator `tp` of ranks 2-3 on node7, a host that has not said its name must connect, but "
        "the cable is out"
    )


def test_a_communicator_that_miscounts_is_refused():
    context = recording_context(ProcessGrid(dp=2), 0, TrafficLog(), "cpu")  # where nobody adds anything
    with pytest.raises(CommunicationError, match="must count 2 members, but a sum of ones gave 1;"):
        warm_up(context)
    world = ThreadWorld(2, timeout=20.0)
    world.run(lambda rank: warm_up(thread_context(world, ProcessGrid(dp=2), rank)))


class Options:
    def __init__(self, *, is_high_priority_stream: bool):
        self.is_high_priority_stream = is_high_priority_stream


@pytest.fixture
def nccl(monkeypatch):
    """A torch with NCCL; the arguments of the groups that it opens."""
    asked: list[dict] = []
    fake = SimpleNamespace(
        ProcessGroupNCCL=SimpleNamespace(Options=Options),
        get_backend=lambda: "nccl",
        get_world_size=lambda: 4,
        group=SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=None)),
        new_group=lambda ranks, **options: asked.append({"ranks": ranks, **options}),
        init_process_group=lambda backend, **options: asked.append({"backend": backend, **options}),
    )
    monkeypatch.setattr(torch_group, "dist", fake)
    return asked


def test_urgent_communicators_have_streams_of_high_priority(nccl):
    wait = timedelta(seconds=30)
    torch_group.open_group("tp", 0, (0, 1), wait, urgent=True)
    torch_group.open_group("model", 0, (0, 1), wait)
    torch_group.start_world("nccl", 0, 4, wait, urgent=True, store=None)
    torch_group.start_world("nccl", 0, 4, wait, store=None)
    torch_group.start_world("gloo", 0, 4, wait, urgent=True, store=None)
    urgent, plain, world, plain_world, gloo = (call["pg_options"] for call in nccl)
    for options in (urgent, world):
        assert options.is_high_priority_stream
        assert options._timeout == wait  # or torch warns that it differs
    assert (plain, plain_world, gloo) == (None, None, None)
    assert [call.get("group_desc") for call in nccl[:2]] == ["tp", "model"]  # as NCCL's own log names them


def test_a_second_group_of_all_ranks_is_not_the_world(nccl):
    everyone, wait = (0, 1, 2, 3), timedelta(seconds=30)
    world = torch_group.dist.group.WORLD
    assert torch_group.open_group("replica", 0, everyone, wait).process_group is world
    assert nccl == []
    torch_group.open_group("replica_gather", 0, everyone, wait, urgent=True, second=True)
    assert nccl[0]["ranks"] == [0, 1, 2, 3]


class _PassedEvent:
    """An event of a device that has nothing left to do."""

    def record(self) -> None:
        return None

    def query(self) -> bool:
        return True


def _join_as_on_nccl(rank: int, world_size: int) -> tuple[float, list[str], list[str | None]]:
    """Join the pool's world as ranks on GPUs join NCCL's; the message received, the groups, the hosts."""
    kept, hosts = (launch.choose_backend, launch.start_world, launch.warm_up, torch.cuda.Event), []

    def warmed(context, host_of) -> None:
        warm_up(context, host_of)
        hosts.extend(map(host_of, range(world_size)))

    launch.choose_backend, launch.start_world = (lambda *_: "nccl"), (lambda *_, **__: None)
    launch.warm_up, torch.cuda.Event = warmed, _PassedEvent
    try:
        config = ParallelConfig(pipeline_model_parallel_size=world_size, device="cpu")
        context = join(config, Launch(rank, world_size, rank), zero_stage=1)
    finally:
        launch.choose_backend, launch.start_world, launch.warm_up, torch.cuda.Event = kept
    context.watch.close()
    number = torch.tensor([float(rank)])
    context.pp.all_reduce(number).wait()
    after = Transfer("send", number, rank + 1, 0), Transfer("recv", torch.zeros(1), rank - 1, 0)
    mine = [t for t in after if 0 <= t.peer < world_size]
    for work in context.pp.exchange(mine):
        work.wait()
    received = next((float(t.tensor) for t in mine if t.kind == "recv"), -1.0)
    launch.close_groups(context)
    return received, [group.name for group in context.pp.groups], hosts


@pytest.mark.gloo
def test_a_job_opens_second_groups_and_warms_all(pool):
    first, *rest = pool.run(_join_as_on_nccl, 3)
    names, hosts = ["pp", "pp_odd"], [socket.gethostname()] * 3
    assert first == (-1.0, names, hosts)
    assert rest == [(3.0, names, hosts)] * 2


@pytest.mark.parametrize("seconds", [(), ("replica_gather",)])
def test_a_run_with_second_communicators_lists_all_at_its_start(capfd, seconds):
    words = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --vocab-size 16"
    flags = f"{words} --mock-data --micro-batch-size 1 --global-batch-size 2 --train-iters 1 --lr 1e-3"
    config = parse_config([*flags.split(), "--zero-stage", "1"], world_size=2).config
    world = ThreadWorld(2, timeout=60.0)
    world.run(lambda r: pretrain_on(config, thread_context(world, ProcessGrid(dp=2), r, seconds=seconds)))
    lines = capfd.readouterr().out.splitlines()
    listed = [line for line in lines if "ranks   high" in line]
    assert [line.split()[0] for line in listed] == (["data", "replica_gather"] if seconds else [])
