"""The diagnosis on literal logs, and one process's side of the watch."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megazero.errors import CommunicationError, DataError
from megazero.mpu import Group, SoloGroup, ThreadWorld, Transfer
from megazero.mpu.watch import Watch
from megazero.mpu.watch_diagnose import Finding, FindingKind, diagnose, render
from megazero.mpu.watch_group import WatchedGroup
from megazero.mpu.watch_inquest import Inquest
from megazero.mpu.watch_log import SLOTS, CallLog, Lane, read_log
from megazero.mpu.watch_report import Alarm, CallRecord, CallState, LaneRecord, Report
from tests.mpu.test_groups import conform, expected

GROUPS = {"tp": (0, 1), "dp": (0, 2), "world": (0, 1, 2), "0>1": (0, 1)}


def report(
    rank: int,
    log: str,
    *,
    alarm: Alarm = Alarm.TIMEOUT,
    error: str = "",
    alive: bool = True,
    stack: tuple[str, ...] = ("train.py:7 in step",),
) -> Report:
    """A report from a log such as ``tp reduce 4 a.py:1; world barrier - b.py:2 waited``.

    Each call is group, operation, shape (- for none), site and perhaps a state; a call starts one second
    after the one before it.
    """
    calls, counts = [], dict.fromkeys(GROUPS, 0)
    for serial, text in enumerate((part.split() for part in log.split(";") if part.strip()), 1):
        lane, what, sizes, site, *state = text
        counts[lane] += 1
        sizes = "" if sizes == "-" else f"[{sizes}] float32"
        state = CallState(state[0]) if state else CallState.DONE
        calls.append(CallRecord(serial, lane, counts[lane], what, sizes, site, "", float(serial), state))
    lanes = {name: LaneRecord(f"group `{name}`", GROUPS[name], counts[name]) for name in GROUPS}
    lanes = {key: lane for key, lane in lanes.items() if rank in lane.members} if alive else {}
    return Report(rank, "host", 0.0, alarm, error, lanes, tuple(calls), stack, alive)


def findings(*reports: Report, world_size: int | None = None) -> list[Finding]:
    by_rank = {each.rank: each for each in reports}
    return list(diagnose(by_rank, world_size or len(reports), grace=5.0).findings)


def test_another_operation_is_named_by_majority():
    (found,) = findings(
        report(0, "world reduce 4 a.py:1; world reduce 8 a.py:2 waited"),
        report(1, "world reduce 4 a.py:1; world gather 8 a.py:3 waited"),
        report(2, "world reduce 4 a.py:1; world reduce 8 a.py:2 waited"),
    )
    assert found == Finding(
        FindingKind.DIVERGED,
        (1,),
        "rank 1 diverged at call 2 of group `world`: rank 1 made gather [8] float32 at a.py:3; "
        "ranks 0, 2 made reduce [8] float32 at a.py:2",
    )


def test_another_shape_is_named_also_when_its_rank_went_on():
    (found,) = findings(
        report(0, "world reduce 4 a.py:1 waited"),
        report(1, "world reduce 4 a.py:1 waited"),
        report(2, "world reduce 5 a.py:1; world barrier - a.py:9 waited"),
    )
    assert found.ranks == (2,)
    assert "rank 2 diverged at call 1 of group `world`: rank 2 made reduce [5] float32" in found.text


def test_a_tie_accuses_both():
    (found,) = findings(report(0, "tp reduce 4 a.py:1 waited"), report(1, "tp reduce 5 a.py:1 waited"))
    assert found.ranks == (0, 1)
    assert found.text.startswith("ranks 0, 1 differ at call 1 of group `tp`: rank 0 made reduce [4]")


def test_call_sites_that_part_before_the_calls_differ_are_told():
    (found,) = findings(
        report(
            0, "world reduce 4 a.py:1; world reduce 4 a.py:2; world reduce 4 a.py:3; world reduce 9 a.py:4"
        ),
        report(
            1, "world reduce 4 a.py:1; world reduce 4 a.py:3; world reduce 4 a.py:3; world barrier - a.py:5"
        ),
        report(
            2, "world reduce 4 a.py:1; world reduce 4 a.py:2; world reduce 4 a.py:2; world reduce 9 a.py:4"
        ),
    )
    assert "rank 1 diverged at call 4" in found.text
    # Rank 1 left out the reduce of line 2, which nobody could see in the shapes.
    assert found.text.endswith(
        "the call sites part before, at call 2: rank 0 at a.py:2; rank 1 at a.py:3; rank 2 at a.py:2"
    )


def test_sites_that_always_differ_are_not_told():
    (found,) = findings(
        report(0, "tp reduce 4 a.py:1; tp reduce 4 a.py:1; tp reduce 9 a.py:1"),
        report(1, "tp reduce 4 b.py:1; tp reduce 4 b.py:1; tp reduce 8 b.py:1"),
    )
    assert "part before" not in found.text


def test_of_several_groups_the_one_that_differs_earliest_comes_first():
    first, second = findings(
        report(0, "tp reduce 4 a.py:1; dp reduce 4 a.py:2; tp reduce 4 a.py:3"),
        report(1, "tp reduce 4 a.py:1; tp barrier - a.py:5"),
        report(2, "dp reduce 7 a.py:2"),
    )
    assert "call 1 of group `dp`" in first.text
    assert "call 2 of group `tp`" in second.text


def test_a_message_and_its_receive_agree_on_their_sizes_alone():
    assert (
        findings(report(0, "0>1 send 4 a.py:1"), report(1, "0>1 recv 4 b.py:1"))[0].kind is FindingKind.STUCK
    )
    (found,) = findings(report(0, "0>1 send 4 a.py:1"), report(1, "0>1 recv 5 b.py:1 waited"))
    assert (found.kind, found.ranks) == (FindingKind.DIVERGED, (0, 1))


def test_who_never_came_is_named_with_what_it_does():
    (found,) = findings(
        report(0, "world reduce 4 a.py:1; world reduce 8 a.py:2 waited"),
        report(
            1, "world reduce 4 a.py:1", alarm=Alarm.TOLD, stack=("main.py:1 in main", "data.py:5 in read")
        ),
        report(2, "world reduce 4 a.py:1; world reduce 8 a.py:2 waited"),
    )
    assert found == Finding(
        FindingKind.MISSING,
        (1,),
        "rank 1 never came to call 2 of group `world`, reduce [8] float32 at a.py:2, where ranks 0, 2 wait; "
        "rank 1: outside any call, at data.py:5 in read; its log ends after call 1 of group `world`: "
        "reduce [4] float32 at a.py:1",
    )


def test_who_is_held_up_by_another_is_not_accused():
    """Rank 2 waits for rank 0, which waits for rank 1, which does something else."""
    (found,) = findings(
        report(0, "tp reduce 4 a.py:1 waited"),
        report(1, "", alarm=Alarm.TOLD),
        report(2, "dp reduce 4 a.py:2 waited"),
    )
    assert found.ranks == (1,)


def test_ranks_that_wait_for_each_other_are_all_accused():
    found = findings(
        report(0, "tp reduce 4 a.py:1 waited"),
        report(1, "world barrier - a.py:2 waited"),
        report(2, "world barrier - a.py:2 waited"),
    )
    assert [each.ranks for each in found] == [(1,), (0,)]


def test_a_rank_without_a_report_is_gone_and_nobody_else_is_accused():
    (found,) = findings(
        report(0, "world barrier - a.py:1 waited"), report(1, "", alarm=Alarm.TOLD), world_size=3
    )
    assert found == Finding(
        FindingKind.GONE, (2,), "rank 2 is gone: no report within 5 s (dead, frozen or out of reach)"
    )


def test_the_log_of_a_dead_rank_counts():
    diverged, gone = findings(
        report(0, "tp reduce 4 a.py:1 waited"), report(1, "tp reduce 5 a.py:1 waited", alive=False)
    )
    assert (diverged.kind, gone.kind, gone.ranks) == (FindingKind.DIVERGED, FindingKind.GONE, (1,))
    assert gone.text.endswith("its log ends in call 1 of group `tp`: reduce [5] float32 at a.py:1")


def test_an_error_is_the_cause_of_its_rank_and_not_of_those_who_wait():
    (found,) = findings(
        report(0, "world barrier - a.py:1 waited", alarm=Alarm.TOLD),
        report(1, "", alarm=Alarm.RAISED, error="DataError: torn"),
        report(2, "world barrier - a.py:1 waited", alarm=Alarm.COMMUNICATION, error="connection closed"),
    )
    assert found == Finding(FindingKind.RAISED, (1,), "rank 1 raised DataError: torn")


def test_one_error_on_all_ranks_is_told_once():
    (found,) = findings(*(report(r, "", alarm=Alarm.RAISED, error="ConfigError: bad") for r in range(3)))
    assert found.text == "ranks 0, 1, 2 raised ConfigError: bad"


def test_a_failed_call_is_told_when_nothing_else_explains_it():
    calls = "world barrier - a.py:1 waited"
    (found,) = findings(
        report(0, calls, alarm=Alarm.TOLD),
        report(1, calls, alarm=Alarm.COMMUNICATION, error="no route to host"),
        report(2, calls, alarm=Alarm.TOLD),
    )
    assert found == Finding(FindingKind.FAILED, (1,), "rank 1: no route to host")


def test_who_is_only_slower_than_a_call_that_failed_is_not_accused():
    (found,) = findings(
        report(0, "tp reduce 4 a.py:1 waited", alarm=Alarm.COMMUNICATION, error="connection reset"),
        report(1, "", alarm=Alarm.TOLD),
    )
    assert (found.kind, found.ranks) == (FindingKind.FAILED, (0,))


def test_ranks_that_agree_are_stuck():
    calls = "tp barrier - a.py:1 waited"
    (found,) = findings(report(0, calls, error="barrier took more than 3 s"), report(1, calls))
    assert found.kind is FindingKind.STUCK
    assert "all ranks agree" in found.text


def test_the_page_of_a_large_job_stays_short():
    size = 500
    reports = {r: report(r, "world barrier - a.py:1 waited") for r in range(3, size)}
    page = render(diagnose(reports, size), reports, size)
    assert "497 of 500 ranks reported" in page
    assert "ranks 0, 1, 2 are gone" in page
    assert "ranks 3, 4, 5, 6, 7, 8, 9 ... 499, 497 in all: in call 1 of group `world`" in page
    assert len(page.splitlines()) < 10


def test_a_report_survives_its_journey():
    original = report(1, "tp reduce 4 a.py:1; world barrier - b.py:2 waited", error="é")
    assert Report.from_json(original.to_json()) == original


# The log.


def test_a_log_is_read_from_outside_and_keeps_the_latest(tmp_path):
    log, lane = CallLog(str(tmp_path)), Lane("tp#1", "group `tp`", (0, 1))
    held = log.begin(lane, "barrier", None, None, None)
    for n in range(SLOTS + 10):
        log.finish(log.begin(lane, "all_reduce", "sum", (n, 2), torch.bfloat16))
    last = log.begin(lane, "broadcast", 1, (3,), torch.int64)
    seen = read_log(log.path)
    assert len(seen) == SLOTS
    assert [call.sequence for call in seen] == list(range(13, SLOTS + 13))
    assert (seen[-2].call, seen[-2].state) == (f"all_reduce(sum) [{SLOTS + 9}, 2] bfloat16", CallState.DONE)
    assert (seen[-1].call, seen[-1].state) == ("broadcast(1) [3] int64", CallState.WAITED)
    # This process also knows of the one that has long been pushed out.
    assert [call.sequence for call in log.records()] == [1, *range(13, SLOTS + 13)]
    log.finish(held)
    log.finish(last)
    assert log.records()[-1].state is CallState.DONE
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_call_is_placed_where_it_was_made_and_by_whom(tmp_path):
    source = "def gather(log, lane):\n    return log.begin(lane, 'all_gather', None, (2,), None)\n"
    space: dict = {}
    exec(compile(source, str(tmp_path / "collectives.py"), "exec"), space)
    log = CallLog()
    record = log.record(space["gather"](log, Lane("tp", "tp", (0, 1))))
    assert record.site.endswith("collectives.py:2")
    assert record.asker.startswith("tests/mpu/test_watch.py:")


# One process.


class Notes:
    """A board in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        self.texts[key] = text

    def read(self, key: str) -> str | None:
        return self.texts.get(key)


class Lost(Notes):
    """A board that is out of reach after the first note."""

    def read(self, key: str) -> str | None:
        raise CommunicationError("the notes are gone")


class Spared:
    """An ending that is only noted."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ended = threading.Event()

    def prepare(self, seconds: float) -> None:
        self.said.append("prepare")

    def cancel(self) -> None:
        self.said.append("cancel")

    def end(self) -> None:
        self.said.append("end")
        self.ended.set()


def watches(
    board: Notes, size: int, ending: Spared, timeout: float = 20.0, grace: float = 5.0
) -> list[Watch]:
    return [Watch(board, rank, size, timeout, grace, 0.02, ending) for rank in range(size)]


def close_all(all_watches: list[Watch]) -> None:
    for watch in all_watches:
        watch.close()


def test_a_watched_group_conforms():
    world, board = ThreadWorld(3, timeout=20), Notes()
    all_watches = watches(board, 3, Spared())
    for check_on in (None, "cpu"):
        got = world.run(
            lambda r, on=check_on: conform(all_watches[r].wrap(world.group("g", r, (0, 1, 2)), check_on=on))
        )
        assert got == [expected(r, 3) for r in range(3)]
    assert [len(watch._log.pending) for watch in all_watches] == [0, 0, 0]
    close_all(all_watches)
    assert set(board.texts) == {"log/0", "log/1", "log/2"}


def test_a_watched_group_is_a_group_and_closes_what_it_wraps():
    world, (watch, other) = ThreadWorld(2), watches(Notes(), 2, Spared())
    inner = world.group("g", 0, (0, 1))
    inner.close = lambda: closed.append(True)
    closed: list[bool] = []
    group = watch.wrap(inner)
    assert isinstance(group, Group)
    assert isinstance(group, WatchedGroup)
    assert (group.name, group.rank, group.ranks, group.size) == ("g", 0, (0, 1), 2)
    group.close()
    assert closed == [True]
    close_all([watch, other])


def test_a_world_of_one_starts_nothing():
    board, before = Notes(), threading.active_count()
    watch, group = Watch(board, 0, 1, 1.0), SoloGroup()
    assert watch.wrap(group) is group
    watch.report(DataError("torn"))
    assert threading.active_count() == before
    watch.close()
    assert board.texts == {}


def test_closing_ends_the_threads_and_says_nothing(capfd):
    before = threading.active_count()
    ending = Spared()
    all_watches = watches(Notes(), 2, ending)
    assert threading.active_count() == before + 4
    close_all(all_watches)
    assert threading.active_count() == before
    assert ending.said == []
    assert capfd.readouterr().err == ""


def test_after_word_of_trouble_every_call_raises_the_diagnosis(capfd):
    ending = Spared()
    first, second = watches(Notes(), 2, ending)
    group = second.wrap(ThreadWorld(2).group("tp", 1, (0, 1)))
    first.report(DataError("torn file"))
    with pytest.raises(CommunicationError, match="the job has failed: rank 0 raised DataError: torn file"):
        group.all_reduce(torch.zeros(2))
    close_all([first, second])
    assert ending.said.count("prepare") == ending.said.count("cancel") == 2
    assert "end" not in ending.said
    assert capfd.readouterr().err.count("rank 0 raised DataError: torn file") == 2


def test_a_main_thread_that_does_not_end_is_ended():
    ending = Spared()
    (first, second) = watches(Notes(), 2, ending, grace=0.3)
    first.report(DataError("torn file"))
    assert ending.ended.wait(10)
    close_all([first, second])


class Pending:
    """A work that is done when it is told to."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        assert self.done


class Slow:
    """A group whose asynchronous calls return a given work."""

    name, rank, ranks, size = "tp", 0, (0, 1), 2

    def __init__(self, work: object):
        self.work = work

    def all_reduce(self, tensor, op="sum", *, async_op=False):
        return self.work

    def exchange(self, transfers):
        return [self.work for _ in transfers]


def keep_calling(watch: Watch) -> None:
    """Work that has nothing to do with the call that others wait in, for as long as it may go on."""
    while True:
        time.sleep(0.05)
        watch.finish(watch.begin(watch.collective_lane("dp", (0, 1)), "barrier", None, None, None))


def test_a_work_that_stays_unfinished_is_found_though_nobody_waits_for_it(capfd):
    first, second = watches(Notes(), 2, Spared(), timeout=0.2)
    work = first.wrap(Slow(Pending())).all_reduce(torch.zeros(2), async_op=True)
    with pytest.raises(CommunicationError, match=r"rank 1 never came to call 1 of group `tp` \(ranks 0, 1\)"):
        keep_calling(second)
    with pytest.raises(CommunicationError, match="rank 1 never came"):
        work.wait()
    close_all([first, second])


@pytest.mark.parametrize("how", ["done", "dropped", "lazy"])
def test_a_work_that_is_done_or_dropped_or_not_begun_is_in_nobodys_way(how):
    """A work without `is_completed` may do its part only when it is waited for."""
    all_watches = watches(Notes(), 2, Spared(), timeout=0.1)
    pending = Pending() if how != "lazy" else object()
    work = all_watches[0].wrap(Slow(pending)).exchange([Transfer("send", torch.zeros(2), 1)])
    if how == "done":
        pending.done = True
    if how == "dropped":
        del work
    time.sleep(0.4)
    assert [watch._alarm for watch in all_watches] == [None, None]
    close_all(all_watches)


def test_an_error_of_a_work_reaches_the_others():
    class Failing:
        def wait(self):
            raise RuntimeError("connection reset")

    first, second = watches(Notes(), 2, Spared())
    work = first.wrap(Slow(Failing())).all_reduce(torch.zeros(2), async_op=True)
    with pytest.raises(
        CommunicationError, match=r"rank 0: all_reduce\(sum\) at .*test_watch.py:\d+ .*failed: conn"
    ):
        work.wait()
    close_all([first, second])


def test_a_board_out_of_reach_is_no_alarm_for_a_process_that_is_about_to_end(capfd):
    watch = Watch(Lost(), 0, 2, 20.0, grace=5.0, poll=0.02, ending=Spared())
    time.sleep(0.2)
    watch.close()
    assert capfd.readouterr().err == ""


def test_a_board_that_stays_out_of_reach_is_one(capfd):
    watch = Watch(Lost(), 0, 2, 20.0, grace=0.1, poll=0.02, ending=Spared())
    time.sleep(0.5)
    watch.close()
    assert (
        "megazero: the job has failed: the notes are gone; rank 0: outside any call" in capfd.readouterr().err
    )


def test_the_lowest_rank_that_lives_makes_the_diagnosis(capfd):
    board = Notes()
    inquests = [Inquest(board, rank, 3, 0.5) for rank in range(3)]
    for inquest in inquests:
        inquest.announce("host", None)
    summaries: dict[int, str] = {}

    def attend(rank: int) -> None:
        summaries[rank] = inquests[rank].hold(report(rank, "world barrier - a.py:1 waited"))

    threads = [threading.Thread(target=attend, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        summaries[1]
        == summaries[2]
        == "rank 0 is gone: no report within 0.5 s (dead, frozen or out of reach)"
    )
    said = capfd.readouterr().err
    assert said.count("2 of 3 ranks reported") == 1
    assert "megazero: rank 2 ends with its job: rank 0 is gone" in said
