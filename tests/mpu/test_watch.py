"""The log of calls, and one process's side of the watch."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from megazero.errors import CommunicationError, DataError
from megazero.mpu.group import Group, Transfer
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.watch.failure import FailureDiagnosis
from megazero.mpu.watch.group import WatchedGroup, watched
from megazero.mpu.watch.log import SLOTS, CallLog, Channel, read_log
from megazero.mpu.watch.report import CallState
from megazero.mpu.watch.watch import Watch, WatchLimits
from tests.mpu.test_groups import conform, expected
from tests.mpu.test_watch_diagnose import report

# The log.


def test_a_log_is_read_from_outside_and_keeps_the_latest(tmp_path):
    log, channel = CallLog(str(tmp_path)), Channel("tp#1", "group `tp`", (0, 1))
    held = log.begin(channel, "barrier", None, None, None)
    for n in range(SLOTS + 10):
        log.finish(log.begin(channel, "all_reduce", "sum", (n, 2), torch.bfloat16))
    last = log.begin(channel, "broadcast", 1, (3,), torch.int64)
    seen = read_log(log.path)
    assert len(seen) == SLOTS
    assert [call.sequence for call in seen] == list(range(13, SLOTS + 13))
    assert (str(seen[-2].operation), seen[-2].state) == (
        f"all_reduce(sum) [{SLOTS + 9}, 2] bfloat16",
        CallState.DONE,
    )
    assert (str(seen[-1].operation), seen[-1].state) == ("broadcast(1) [3] int64", CallState.WAITED)
    # This process also knows of the one that has long been pushed out.
    assert [call.sequence for call in log.records()] == [1, *range(13, SLOTS + 13)]
    log.finish(held)
    log.finish(last)
    assert log.records()[-1].state is CallState.DONE
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_logs_of_killed_processes_do_not_stay(tmp_path):
    """A job whose ranks were all killed left its files in the temporary folder for ever."""
    living, killed, latest = (CallLog(str(tmp_path)) for _ in range(3))
    for log in (killed, latest):
        log._ring.close()  # as the system does with what a process has mapped
    for log in (living, killed):
        os.utime(log.path, (0, 0))
    others = [tmp_path / "megazero-calls-text", tmp_path / "megazero-calls-link"]
    others[0].write_text("not a log")
    others[1].symlink_to(killed.path)
    new = CallLog(str(tmp_path))
    kept = {living.path, latest.path, new.path, *map(str, others)}
    assert set(map(str, tmp_path.iterdir())) == kept


def test_a_note_cannot_have_a_file_read_or_removed_that_is_no_log(tmp_path):
    """Who reaches the store says where a rank's log is; any file of the right length was removed."""
    size = Path(CallLog(str(tmp_path)).path).stat().st_size
    weights = tmp_path / "weights.bin"
    weights.write_bytes(bytes(size))
    link = tmp_path / "megazero-calls-link"
    link.symlink_to(weights)
    job_notes = Notes()
    for rank, note in enumerate(
        [["here", str(weights)], ["here", str(link)], ["here", "/dev/zero"], ["here", 7], 5, {"a": "b"}]
    ):
        job_notes.post(f"log/{rank}", json.dumps(note))
    job_notes.post("log/6", "\udcff[")
    inquest = FailureDiagnosis(job_notes, 7, 8, 0.1)
    inquest._host = "here"
    inquest._speak_for(list(range(7)))
    assert all(job_notes.read(f"report/{rank}") is None for rank in range(7))
    assert weights.exists()
    assert link.is_symlink()


def test_a_call_is_placed_where_it_was_made_and_by_whom(tmp_path):
    source = "def gather(log, channel):\n    return log.begin(channel, 'all_gather', None, (2,), None)\n"
    space: dict = {}
    exec(compile(source, str(tmp_path / "collectives.py"), "exec"), space)
    log = CallLog()
    record = log.record(space["gather"](log, Channel("tp", "tp", (0, 1))))
    assert record.place.site.endswith("collectives.py:2")
    assert record.place.asker.startswith("tests/mpu/test_watch.py:")


# One process.


class Notes:
    """Notes in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        self.texts[key] = text

    def read(self, key: str) -> str | None:
        return self.texts.get(key)

    def read_all(self, keys: list[str]) -> list[str | None]:
        return [self.read(key) for key in keys]


class Lost(Notes):
    """Notes that are out of reach after the first one."""

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
    job_notes: Notes, size: int, ending: Spared, timeout: float = 20.0, grace: float = 5.0
) -> list[Watch]:
    return [Watch(job_notes, rank, size, WatchLimits(timeout, grace, 0.02), ending) for rank in range(size)]


def close_all(all_watches: list[Watch]) -> None:
    for watch in reversed(all_watches):  # rank 0 waits for the others
        watch.close()


def test_a_watched_group_conforms():
    world, job_notes = ThreadWorld(3, timeout=20), Notes()
    all_watches = watches(job_notes, 3, Spared())
    for check_on in (None, "cpu"):
        got = world.run(
            lambda r, on=check_on: conform(
                watched(world.group("g", r, (0, 1, 2)), all_watches[r], check_on=on)
            )
        )
        assert got == [expected(r, 3) for r in range(3)]
    assert [len(watch._log.pending) for watch in all_watches] == [0, 0, 0]
    close_all(all_watches)
    assert set(job_notes.texts) == {f"{what}/{rank}" for what in ("log", "parted") for rank in range(3)}


def test_a_watched_group_is_a_group_and_closes_what_it_wraps():
    world, (watch, other) = ThreadWorld(2), watches(Notes(), 2, Spared())
    inner = world.group("g", 0, (0, 1))
    inner.close = lambda: closed.append(True)
    closed: list[bool] = []
    group = watched(inner, watch)
    assert isinstance(group, Group)
    assert isinstance(group, WatchedGroup)
    assert (group.name, group.rank, group.ranks, group.size) == ("g", 0, range(2), 2)
    group.close()
    assert closed == [True]
    close_all([watch, other])


def test_a_world_of_one_starts_nothing():
    job_notes, before = Notes(), threading.active_count()
    watch, group = Watch(job_notes, 0, 1, WatchLimits(1.0)), SoloGroup()
    assert watched(group, watch) is group
    watch.report(DataError("torn"))
    assert threading.active_count() == before
    watch.close()
    assert job_notes.texts == {}


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
    group = watched(ThreadWorld(2).group("tp", 1, (0, 1)), second)
    first.report(DataError("torn file"))
    with pytest.raises(CommunicationError, match="the job has failed: rank 0 raised DataError: torn file"):
        group.all_reduce(torch.zeros(2))
    close_all([first, second])
    assert ending.said.count("prepare") == ending.said.count("cancel") == 2
    assert "end" not in ending.said
    assert capfd.readouterr().err.count("rank 0 raised DataError: torn file") == 2


def test_an_error_is_told_with_the_place_that_raised_it(capfd):
    (first, second) = watches(Notes(), 2, Spared())
    try:
        raise DataError("torn file")
    except DataError as error:
        first.report(error)
    close_all([first, second])
    said = capfd.readouterr().err
    place = rf"tests/mpu/test_watch.py:\d+ in {test_an_error_is_told_with_the_place_that_raised_it.__name__}"
    assert re.search(rf"rank 0: outside any call, at {place}, raised DataError: torn file", said)


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
        watch.finish(watch.begin(watch.collective_channel("dp", (0, 1)), "barrier", None, None, None))


def test_a_work_that_stays_unfinished_is_found_though_nobody_waits_for_it(capfd):
    first, second = watches(Notes(), 2, Spared(), timeout=0.2)
    work = watched(Slow(Pending()), first).all_reduce(torch.zeros(2), async_op=True)
    with pytest.raises(CommunicationError, match=r"rank 1 never came to call 1 of group `tp` \(ranks 0, 1\)"):
        keep_calling(second)
    with pytest.raises(CommunicationError, match="rank 1 never came"):
        work.wait()
    close_all([first, second])


def test_a_call_that_does_not_get_under_way_is_found_though_it_is_for_later(capfd):
    """A transport may hold up whoever starts a call, as one that connects at its first call does."""
    first, second = watches(Notes(), 2, Spared(), timeout=0.2)

    class Blocking(Slow):
        def all_reduce(self, tensor, op="sum", *, async_op=False):
            ends = time.monotonic() + 20
            while first._alarm is None and time.monotonic() < ends:
                time.sleep(0.02)
            return self.work

    watched(Blocking(Pending()), first).all_reduce(torch.zeros(2), async_op=True)
    assert first._alarm is not None, "nobody noticed"
    close_all([first, second])


@pytest.mark.parametrize("how", ["done", "dropped", "lazy"])
def test_a_work_that_is_done_or_dropped_or_not_begun_is_in_nobodys_way(how):
    """A work without `is_completed` may do its part only when it is waited for."""
    all_watches = watches(Notes(), 2, Spared(), timeout=0.1)
    pending = Pending() if how != "lazy" else object()
    work = watched(Slow(pending), all_watches[0]).exchange([Transfer("send", torch.zeros(2), 1)])
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
    work = watched(Slow(Failing()), first).all_reduce(torch.zeros(2), async_op=True)
    with pytest.raises(
        CommunicationError, match=r"rank 0: all_reduce\(sum\) at .*test_watch.py:\d+ .*failed: conn"
    ):
        work.wait()
    close_all([first, second])


def test_a_diagnosis_that_fails_keeps_nobody_waiting(capfd):
    class Broken(Notes):
        def post(self, key: str, text: str) -> None:
            if key == "trouble":
                raise RuntimeError("dictionary changed size")

    watch, other = watches(Broken(), 2, Spared())
    began = time.monotonic()
    error = watch.fail(
        watch.begin(watch.collective_channel("dp", (0, 1)), "barrier", None, None, None), ValueError("no")
    )
    assert time.monotonic() - began < 5
    assert "its diagnosis failed: RuntimeError: dictionary changed size" in str(error)
    assert "Traceback" in capfd.readouterr().err
    close_all([watch, other])


def test_notes_out_of_reach_are_no_alarm_for_a_process_that_is_about_to_end(capfd):
    watch = Watch(Lost(), 0, 2, WatchLimits(20.0, 5.0, 0.02), Spared())
    time.sleep(0.2)
    watch.close()
    assert capfd.readouterr().err == ""


def test_notes_that_stay_out_of_reach_are_one(capfd):
    watch = Watch(Lost(), 0, 2, WatchLimits(20.0, 0.1, 0.02), Spared())
    time.sleep(0.5)
    watch.close()
    assert (
        "megazero: the job has failed: the notes are gone; rank 0: outside any call" in capfd.readouterr().err
    )


def test_the_lowest_rank_that_lives_makes_the_diagnosis(capfd):
    job_notes = Notes()
    inquests = [FailureDiagnosis(job_notes, rank, 3, 0.5) for rank in range(3)]
    for diagnosis in inquests:
        diagnosis.announce("host", None)
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
