"""One conformance suite for every `Group`: threads, Gloo processes, a group of one, and the recorder."""

from __future__ import annotations

import pytest
import torch

from megazero.errors import CommunicationError
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.group import Group, Transfer
from megazero.mpu.messages import gather_values
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.still_group import StillGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.traffic import CountingGroup, TrafficLog, recording_context
from megazero.mpu.wrapping_group import WrappingGroup
from tests.tables import over_table


def conform(group: Group) -> dict:
    """Call everything once; values are chosen so that a wrong rank, order or op shows."""
    r, n = group.rank, group.size
    out = {}
    for op in ("sum", "max", "min"):
        x = torch.tensor([r + 1.0, -r])
        group.all_reduce(x, op).wait()
        out[op] = x.tolist()
    y = torch.empty(2 * n, 1)
    group.all_gather(y, torch.tensor([[float(r)], [r + 10.0]]), async_op=True).wait()
    out["gather"] = y.flatten().tolist()
    z = torch.empty(2)
    group.reduce_scatter(z, torch.arange(2.0 * n) * (r + 1)).wait()
    out["scatter"] = z.tolist()
    a = torch.empty(2 * n)
    group.all_to_all(
        a, torch.tensor([10.0 * r + peer + half for peer in range(n) for half in (0, 0.5)])
    ).wait()
    out["to_all"] = a.tolist()
    b = torch.tensor([float(r)])
    group.broadcast(b, n - 1).wait()
    out["broadcast"] = b.tolist()
    ahead, behind = (r + 1) % n, (r - 1) % n
    c, d = torch.empty(1), torch.empty(1)
    works = group.exchange(
        [
            Transfer("send", torch.tensor([r + 0.5]), ahead, tag=1),
            Transfer("send", torch.tensor([r + 0.25]), ahead, tag=2),
            Transfer("recv", d, behind, tag=2),
            Transfer("recv", c, behind, tag=1),
        ]
    )
    assert len(works) == 4
    for work in works:
        work.wait()
    out["ring"] = [c.item(), d.item()]
    bf = torch.full((3,), 1.0 + r, dtype=torch.bfloat16)
    group.all_reduce(bf).wait()
    out["bf16"] = bf.tolist()
    group.barrier()
    out["values"] = gather_values(group, {"rank": r, "text": "é" * r})
    return out


def expected(r: int, n: int) -> dict:
    total = n * (n + 1) / 2
    return {
        "sum": [total, -(total - n)],
        "max": [n, 0.0],
        "min": [1.0, -(n - 1.0)],
        "gather": [v for i in range(n) for v in (float(i), i + 10.0)],
        "scatter": [2 * r * total, (2 * r + 1) * total],
        "to_all": [10.0 * peer + r + half for peer in range(n) for half in (0, 0.5)],
        "broadcast": [n - 1.0],
        "ring": [(r - 1) % n + 0.5, (r - 1) % n + 0.25],
        "bf16": [total] * 3,
        "values": [{"rank": i, "text": "é" * i} for i in range(n)],
    }


def test_solo():
    assert conform(SoloGroup()) == expected(0, 1)


@over_table("n", [2, 3, 4])
def test_threads(n):
    world = ThreadWorld(n, timeout=20)
    ranks = tuple(range(n))
    assert world.run(lambda r: conform(world.group("g", r, ranks))) == [expected(r, n) for r in range(n)]


def _gloo(rank: int, world_size: int) -> list:
    from datetime import timedelta

    from megazero.mpu.torch_group import open_group

    ranks = tuple(range(world_size))
    results = [conform(open_group("world", rank, ranks, timedelta(seconds=30)))]
    pair = tuple(range(rank // 2 * 2, rank // 2 * 2 + 2))
    results.append(conform(open_group("pair", rank, pair, timedelta(seconds=30))))
    return results


@pytest.mark.gloo
def test_gloo_processes(pool):
    for rank, (world, pair) in enumerate(pool.run(_gloo, 4)):
        assert world == expected(rank, 4)
        assert pair["sum"] == expected(rank % 2, 2)["sum"]
        assert pair["ring"] == expected(rank % 2, 2)["ring"]


def test_a_group_satisfies_the_protocol():
    world = ThreadWorld(1)
    still = StillGroup("g", 0, (0, 1))
    for group in (SoloGroup(), world.group("g", 0, (0,)), still, WrappingGroup(still)):
        assert isinstance(group, Group)


@pytest.mark.parametrize("wrap", [WrappingGroup, lambda group: CountingGroup(group, TrafficLog())])
def test_a_wrapped_group_does_what_the_inner_one_does(wrap):
    world = ThreadWorld(3, timeout=20)
    ranks = (0, 1, 2)
    results = world.run(lambda r: conform(wrap(world.group("g", r, ranks))))
    assert results == [expected(r, 3) for r in ranks]


def test_a_wrapped_group_hands_everything_on_as_it_was_asked():
    class Asked:
        name, rank, ranks, size = "tp", 1, (4, 5), 2

        def __init__(self):
            self.calls = []

        def __getattr__(self, operation):
            return lambda *args, **more: self.calls.append((operation, args, more))

    inner = Asked()
    group = WrappingGroup(inner, "other")
    assert (group.name, group.rank, group.ranks, group.size) == ("other", 1, (4, 5), 2)
    a, b = torch.zeros(2), torch.ones(4)
    group.all_reduce(a, "max", async_op=True)
    group.all_gather(b, a)
    group.reduce_scatter(a, b, "min", async_op=True)
    group.all_to_all(a, b, (1, 1), (2, 2))
    group.broadcast(a, 1)
    group.exchange(transfers := [Transfer("send", a, 0)])
    group.barrier()
    group.close()
    now, later = {"async_op": False}, {"async_op": True}
    wanted = [
        ("all_reduce", (a, "max"), later),
        ("all_gather", (b, a), now),
        ("reduce_scatter", (a, b, "min"), later),
        ("all_to_all", (a, b, (1, 1), (2, 2)), now),
        ("broadcast", (a, 1), now),
        ("exchange", (transfers,), {}),
        ("barrier", (), {}),
        ("close", (), {}),
    ]
    assert [(name, len(args), more) for name, args, more in inner.calls] == [
        (name, len(args), more) for name, args, more in wanted
    ]
    for (_, found, _), (_, given, _) in zip(inner.calls, wanted, strict=True):
        assert all(x is y or x == y for x, y in zip(found, given, strict=True))


def test_communicators_over_the_same_ranks_are_one_group_counted_by_name():
    log = TrafficLog()
    context = recording_context(ProcessGrid(dp=4), 2, log)
    assert context.replica.inner is context.data.inner is context.world.inner
    x = torch.empty(3, device="meta")
    for group in (context.data, context.replica, context.world, context.world):
        group.all_reduce(x)
    assert log.calls == {
        ("data", "all_reduce"): 1,
        ("replica", "all_reduce"): 1,
        ("world", "all_reduce"): 2,
    }


def test_recording_counts_calls_and_bytes_on_meta_tensors():
    log = TrafficLog()
    context = recording_context(ProcessGrid(pp=8, dp=16, tp=8), 777, log)
    x = torch.empty(4, 8, device="meta")
    context.tp.all_reduce(x)
    context.tp.all_gather(torch.empty(32, 8, device="meta"), x)
    context.data.reduce_scatter(torch.empty(2, device="meta"), torch.empty(32, device="meta"))
    assert log.calls == {("tp", "all_reduce"): 1, ("tp", "all_gather"): 1, ("data", "reduce_scatter"): 1}
    assert log.payload["tp", "all_reduce"] == 4 * 8 * 4
    assert log.payload["tp", "all_gather"] == 8 * 4 * 8 * 4
    assert log.payload["data", "reduce_scatter"] == 32 * 4


def test_threads_that_make_different_calls_are_named():
    world = ThreadWorld(2, timeout=20)

    def work(rank):
        group = world.group("tp", rank, (0, 1))
        group.all_reduce(torch.zeros(2 + rank))

    with pytest.raises(CommunicationError, match=r"rank 0: all_reduce\(sum\) \(2,\).*rank 1: .*\(3,\)"):
        world.run(work)


def test_a_thread_that_fails_ends_the_others():
    world = ThreadWorld(3, timeout=20)

    def work(rank):
        group = world.group("world", rank, (0, 1, 2))
        if rank == 1:
            raise ValueError("rank 1 is ill")
        group.barrier()

    with pytest.raises(ValueError, match="rank 1 is ill"):
        world.run(work)


def test_a_thread_that_never_arrives_times_out():
    world = ThreadWorld(2, timeout=0.2)

    def work(rank):
        if rank == 0:
            world.group("world", rank, (0, 1)).barrier()

    with pytest.raises(CommunicationError, match="did not arrive within"):
        world.run(work)


def test_context_bundles_groups():
    world = ThreadWorld(4)
    grid = ProcessGrid(dp=2, tp=2)
    context = thread_context(world, grid, 3)
    assert (context.tp.ranks, context.data.ranks, context.pp.ranks) == (
        range(2, 4),
        range(1, 5, 2),
        range(3, 4),
    )
    assert context.model is context.tp
    assert context.batch is context.data
