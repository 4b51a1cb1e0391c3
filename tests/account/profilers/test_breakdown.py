"""Where time goes: rows add up to the step, waits are apart, ranks are compared, and nothing synchronizes."""

from __future__ import annotations

import pytest
import torch

from megazero.account.profilers.breakdown import Breakdown, Ledger, add_up
from megazero.account.profilers.breakdown_table import RankStatistics, breakdown_table
from megazero.account.profilers.calls import CollectiveCall
from megazero.account.profilers.clock import CudaClock
from megazero.config.tree.logging import LoggingConfig
from megazero.mpu.thread_group import ThreadWorld
from tests.account.profilers.clocks import SetClock
from tests.account.profilers.runs import train


def wait(ledger: Ledger, clock: SetClock, seconds: float, operation: str = "all_reduce") -> None:
    call = CollectiveCall("tp", operation, 8, (0, 1))
    entered = ledger.enters(call, waits=False)
    clock.time += seconds
    ledger.leaves(call, entered, waits=False)


def test_waits_are_taken_out_of_the_phase_that_they_are_in() -> None:
    clock = SetClock()
    ledger = Ledger(clock)
    wait(ledger, clock, 5.0)  # before the step
    ledger.start()
    clock.time += 1.0
    ledger.mark("data")
    clock.time += 2.0
    wait(ledger, clock, 0.5)
    clock.time += 3.0
    wait(ledger, clock, 0.25)
    ledger.mark("forward")
    wait(ledger, clock, 4.0, "recv")
    clock.time += 6.0
    ledger.mark("backward")
    clock.time += 0.125
    times = add_up(ledger.stop(), clock)
    assert times == {
        "data": 1.0,
        "forward": 5.0,
        "backward": 6.0,
        "rest of the step": 0.125,
        ("tp", "all_reduce"): 0.75,
        ("tp", "recv"): 4.0,
    }
    assert sum(times.values()) == clock.time - 5.0


def test_messages_of_a_batch_are_one_wait() -> None:
    clock = SetClock()
    ledger = Ledger(clock)
    ledger.start()
    calls = [
        CollectiveCall("pp", kind, 8, (0, 1), later=True, number=number)
        for number, kind in enumerate(("send", "recv"))
    ]
    entered = [ledger.enters(call, waits=False) for call in calls]
    clock.time += 2.0
    for call, token in zip(calls, entered, strict=True):
        ledger.leaves(call, token, waits=False)
    assert add_up(ledger.stop(), clock) == {("pp", "send"): 2.0, "rest of the step": 0.0}


def test_spread_over_ranks_takes_two_reductions() -> None:
    world = ThreadWorld(3)
    own = [[1.0, 5.0, 2.0], [3.0, 5.0, 1.0], [2.0, 4.0, 2.0]]

    def work(rank: int):
        spread = RankStatistics.over(
            torch.tensor(own[rank], dtype=torch.float64), world.group("host", rank, (0, 1, 2))
        )
        return spread.least.tolist(), spread.most.tolist(), spread.fastest, spread.slowest

    together = ([1.0, 4.0, 1.0], [3.0, 5.0, 2.0], [0, 2, 1], [1, 0, 0])
    assert world.run(work) == [together] * 3
    everyone = torch.tensor(own, dtype=torch.float64)
    spread = RankStatistics.of_all(everyone[0], everyone)
    assert (spread.least.tolist(), spread.most.tolist(), spread.fastest, spread.slowest) == together


ROWS = ["forward", "backward", ("tp", "all_reduce"), ("pp", "recv"), "whole step"]
EVERYONE = torch.tensor([[0.01, 0.02, 0.008, 0.0, 0.04], [0.011, 0.018, 0.01, 0.0, 0.0405]]).double()


@pytest.mark.parametrize(
    ("option", "heads", "forward"),
    [
        ("minmax", "rank 0|share|least (rank)|most (rank)", "forward|10.00|25.0%|10.00 (0)|11.00 (1)"),
        ("max", "rank 0|share|most (rank)", "forward|10.00|25.0%|11.00 (1)"),
        ("all", "rank 0|share|rank 1", "forward|10.00|25.0%|11.00"),
    ],
)
def test_the_table(option: str, heads: str, forward: str) -> None:
    spread = RankStatistics.of_all(EVERYONE[0], EVERYONE)
    if option != "all":
        spread = RankStatistics(spread.own, spread.least, spread.most, spread.fastest, spread.slowest)
    lines = breakdown_table(ROWS, spread, (1, 10), LoggingConfig(timing_log_option=option), "host")
    cells = ["|".join(part.strip() for part in line.split("  ") if part.strip()) for line in lines]
    assert cells[:3] == [
        "time per iteration (ms) of iterations 1 to 10, by the host's clock",
        heads,
        forward,
    ]
    assert [cell.split("|")[0] for cell in cells[3:]] == [
        "backward",
        "waits: tp all_reduce",  # no rank receives anything, so there is no such row
        "whole step",
        "exposed communication of rank 0: 8.0 ms, 20.0% of a step",
    ]


def numbers(line: str) -> float:
    return float(line[34:50])


@pytest.mark.parametrize("flags", ["--timing-log-level 1", "--wall-clock-breakdown"])
def test_a_run_of_two_stages_prints_rows_that_add_up(capsys, flags: str) -> None:
    train(flags, pp=2, tp=2)
    lines = capsys.readouterr().out.splitlines()
    heads = [at for at, line in enumerate(lines) if "by the host's clock" in line]
    assert len(heads) == 2  # four steps, a table after every second one
    for head in heads:
        rows = []
        for line in lines[head + 2 :]:
            rows.append(line)
            if line.startswith("  whole step"):
                break
        *parts, whole = map(numbers, rows)
        assert sum(parts) == pytest.approx(whole, abs=0.01 * len(parts))
        names = [row[:34].strip() for row in rows]
        assert names[:3] == ["data", "forward", "backward"]
        waits = [name for name in names if name.startswith("waits")]
        if flags == "--timing-log-level 1":
            assert waits == ["waits for communication"]
        else:
            assert {"waits: pp recv", "waits: tp all_reduce"} <= set(waits)


class Event:
    """A CUDA event that the device reaches when `reached` says so."""

    reached = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        return None

    def query(self) -> bool:
        return Event.reached

    def elapsed_time(self, end: Event) -> float:
        assert Event.reached, "asking for a time that is not known waits for the device"
        return 2.0


def test_on_cuda_nothing_waits_for_the_device(monkeypatch) -> None:
    """A timer that waits takes away the overlap that it is to show."""

    def never(*args: object) -> None:
        raise AssertionError("the device was waited for")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", never)
    monkeypatch.setattr(Event, "reached", False)
    world = ThreadWorld(1)
    context = type("Context", (), {"groups": {"host": world.group("host", 0, (0,))}, "rank": 0})()
    breakdown = Breakdown(context, LoggingConfig(wall_clock_breakdown=True, log_interval=100), CudaClock())
    for iteration in (1, 2):
        with breakdown.over_step(iteration):
            breakdown.phase_ends("data")
    assert breakdown._steps == 0
    Event.reached = True
    with breakdown.over_step(3):
        breakdown.phase_ends("data")
    assert breakdown._steps == 3
    assert breakdown._sums["data"] == pytest.approx(3 * 0.002)
