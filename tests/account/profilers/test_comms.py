"""The comms logger: rates by the group's size, waits for the last member, no hangs, bounded memory."""

from __future__ import annotations

import json
import time

import pytest
import torch

from megazero.account.profilers.calls import CollectiveCall, rates
from megazero.account.profilers.clock import HostClock
from megazero.account.profilers.comms import CommsLog, compare_waits
from megazero.account.profilers.comms_table import (
    CallKind,
    CallTotals,
    CommsLine,
    Waiting,
    comms_table,
    size_text,
)
from megazero.account.profilers.files import Folder
from megazero.account.profilers.group import observed
from megazero.config.tree.logging import LoggingConfig
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.account.profilers.clocks import SetClock
from tests.account.profilers.runs import train
from tests.tables import over_table

CPU = torch.device("cpu")


@over_table(
    ("operation", "members", "bus"),
    [
        ("all_reduce", 2, 1000.0),
        ("all_reduce", 4, 1500.0),
        ("all_gather", 4, 750.0),
        ("reduce_scatter", 4, 750.0),
        ("all_to_all", 8, 875.0),
        ("broadcast", 8, 1000.0),
        ("recv", 2, 1000.0),
    ],
)
def test_rates_are_those_of_nccl_tests(operation: str, members: int, bus: float) -> None:
    """500 bytes in half a second."""
    assert rates(operation, 500, 0.5, members) == (1000.0, bus)


def test_the_size_of_the_group_counts_and_not_of_the_world(tmp_path) -> None:
    """On a 2 x 2 grid: the bus carries what the algorithm does in groups of two, 1.5 times it in all."""
    train("--comms-logger --profile-ranks -1 --train-iters 2", tmp_path, tp=2, dp=2)
    for rank in range(4):
        calls = json.loads((tmp_path / f"comms_rank{rank}.json").read_text())["calls"]
        reduces = [c for c in calls if c["operation"] == "all_reduce" and c["seconds"]]
        ratios = {(c["group"], c["members"]): c["bus_gb_per_s"] / c["algorithm_gb_per_s"] for c in reduces}
        assert ratios["tp", 2] == pytest.approx(1.0)
        assert ratios["replica", 2] == pytest.approx(1.0)
        assert ratios["world", 4] == pytest.approx(1.5)
        (gradients,) = [c for c in calls if c["group"] == "replica" and c["operation"] == "all_reduce"][-1:]
        assert gradients["calls"] == 2


def log_of(clock=None, context=None, folder=None, **settings) -> CommsLog:
    context = context or thread_context(ThreadWorld(1), ProcessGrid(), 0)
    logging = LoggingConfig(comms_logger=True, **settings)
    return CommsLog(context, logging, folder or Folder("nowhere", writes=False), clock or SetClock())


def call(
    number: int = 0, *, later: bool = False, nbytes: int = 400, operation: str = "all_reduce"
) -> CollectiveCall:
    return CollectiveCall("tp", operation, nbytes, (0, 1), later, number)


def test_a_call_that_ended_before_it_was_waited_for_has_no_time() -> None:
    clock = SetClock()
    log = log_of(clock)
    for number, wait in enumerate((0.5, 0.0)):
        begun = log.enters(call(number), waits=False)
        clock.time += 0.25
        log.leaves(call(number, later=True), begun, waits=False)
        clock.time += 1.0  # computes
        awaited = log.enters(call(number), waits=True)
        clock.time += wait
        log.leaves(call(number), awaited, waits=True)
    log.settle()
    (row,) = log.rows["tp"].values()
    assert (row.calls, row.hidden, row.exposed) == (2, 1, 1.0)
    assert row.samples == [(0.75, 1.75), (0.25, None)]


def test_times_are_asked_for_once_the_device_has_reached_them() -> None:
    clock = SetClock()
    log = log_of(clock)
    begun = log.enters(call(), waits=False)
    clock.time = 2.0
    log.leaves(call(), begun, waits=False)
    clock.done = 1.0
    log.settle()
    assert log.rows == {}
    clock.done = 2.0
    log.settle()
    assert log.rows["tp"][CallKind("all_reduce", 400)].samples == [(2.0, 2.0)]


def test_only_the_operations_asked_for() -> None:
    log = log_of(comms_logger_ops=("all_gather",))
    log.leaves(call(), log.enters(call(), waits=False), waits=False)
    log.leaves(
        call(operation="all_gather"), log.enters(call(operation="all_gather"), waits=False), waits=False
    )
    log.settle()
    assert list(log.rows["tp"]) == [CallKind("all_gather", 400)]


def test_memory_is_bounded_however_many_calls_and_sizes() -> None:
    row = CallTotals()
    for number in range(100_000):
        row.add(float(number), None)
    assert row.calls == 100_000
    assert 2048 <= len(row.samples) <= 4096
    numbers = [waited for waited, _ in row.samples]
    assert numbers == [32.0 * at for at in range(len(numbers))]  # every 32nd, the same on all members
    log = log_of()
    for nbytes in range(1000, 1500):
        log.leaves(call(nbytes=nbytes), log.enters(call(nbytes=nbytes), waits=False), waits=False)
    log.settle()
    assert len(log.rows["tp"]) == 65  # 64 sizes, and 2048 for all others
    assert sum(row.calls for row in log.rows["tp"].values()) == 500


def test_a_member_that_comes_late_is_named_and_the_others_know_how_long_they_waited(tmp_path) -> None:
    world, said = ThreadWorld(3), []

    def work(rank: int) -> None:
        context = thread_context(world, ProcessGrid(tp=3), rank)
        log = log_of(HostClock(), context, Folder(tmp_path, writes=True))
        group = observed(context, [log]).tp
        for _ in range(10):
            if rank == 1:
                time.sleep(0.03)
            group.all_reduce(torch.ones(100)).wait()
        log._say = said.append if rank == 0 else lambda text: None
        log.conclude()

    world.run(work)
    reports = [json.loads((tmp_path / f"comms_rank{rank}.json").read_text()) for rank in range(3)]
    for rank, report in enumerate(reports):
        (line,) = report["calls"]
        assert (line["group"], line["members"], line["nbytes"], line["calls"]) == ("tp", 3, 400, 10)
        waited = line["waited"]
        assert waited > 0.02 if rank != 1 else waited < 0.01
        (waits,) = report["waits"]
        assert waits["last"] == 1
        assert waits["most"] > 0.02
    assert any("tp: rank 1 comes last: others wait up to " in line for line in said)


def test_members_with_different_calls_compare_nothing_and_nobody_hangs() -> None:
    world = ThreadWorld(2, timeout=20)

    def work(rank: int):
        rows = {CallKind("all_gather" if rank else "all_reduce", 8): CallTotals(1, 0, 0.5, [(0.5, 0.5)])}
        return compare_waits(world.group("pp", rank, (0, 1)), rows, CPU)

    assert world.run(work) == [({}, None)] * 2


def test_stages_with_different_calls_are_summed_up(tmp_path) -> None:
    """The first stage sends what the second receives, and each has tensor-parallel groups of its own."""
    train("--comms-logger --profile-ranks -1 --train-iters 2", tmp_path, pp=2, tp=2)
    kinds = []
    for rank in range(4):
        report = json.loads((tmp_path / f"comms_rank{rank}.json").read_text())
        messages = {c["operation"] for c in report["calls"] if c["group"] == "pp" and c["nbytes"] > 1000}
        kinds.append(messages)
        assert any(c["group"] == "tp" and c["waited"] is not None for c in report["calls"])
        assert all(c["seconds"] is None for c in report["calls"] if c["operation"] in ("send", "recv"))
    assert kinds == [{"send", "recv"}] * 4


def test_the_table() -> None:
    lines = [
        CommsLine(
            "tp", 4, CallKind("all_reduce", 1 << 20), CallTotals(80, 0, 0.24, [(0.003, 0.003)] * 3), 0.001
        ),
        CommsLine("replica", 2, CallKind("all_gather", 3 << 19), CallTotals(4, 4, 0.0, [(0.0, None)] * 4)),
    ]
    head, *rows, last = comms_table(
        lines, [Waiting("tp", 3, 0.0001, 0.0015), Waiting("replica", 0, 1.0, 1.1)]
    )
    assert head.split("  ")[0] == "group"
    assert [row.split() for row in rows] == [
        ["tp", "(4)", "all_reduce", "1", "MiB", "80", "0", "240.0", "3.000", "1.000", "0.524", "0.786"],
        ["replica", "(2)", "all_gather", "1.5", "MiB", "4", "4", "0.0", "-", "-", "-", "-"],
    ]
    assert {len(row) for row in (head, *rows)} == {110}
    assert last == "tp: rank 3 comes last: others wait up to 1.500 ms in a call, and it waits for 0.100 ms"


def test_sizes() -> None:
    assert [size_text(n) for n in (0, 12, 1024, 1536, 1 << 30)] == [
        "0 B",
        "12 B",
        "1 KiB",
        "1.5 KiB",
        "1 GiB",
    ]


def test_each_call_is_said_if_asked_for() -> None:
    clock, said = SetClock(), []
    log = log_of(clock, comms_logger_verbose=True)
    log._say = said.append
    begun = log.enters(call(nbytes=2_000_000), waits=False)
    clock.time = 0.001
    log.leaves(call(nbytes=2_000_000), begun, waits=False)
    log.settle()
    assert said == ["call | tp all_reduce of 1.907 MiB, 2 ranks: 1.000 ms, 2 GB/s, on the bus 2 GB/s"]


def test_groups_give_what_they_gave_and_alone_they_stay_themselves() -> None:
    world = ThreadWorld(2)

    def work(rank: int):
        context = thread_context(world, ProcessGrid(tp=2), rank)
        shown = observed(context, [log_of()])
        assert shown.pp is context.pp
        x = torch.full((2,), float(rank + 1))
        work = shown.tp.all_reduce(x, async_op=True)
        work.wait()
        work.wait()
        shown.tp.barrier()
        return x.tolist()

    assert world.run(work) == [[3.0, 3.0]] * 2
