"""Signs of life: who is named when they stop, and who is not."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from megazero.errors import CommunicationError
from megazero.mpu import tree
from megazero.mpu.watch.failure import FailureDiagnosis
from megazero.mpu.watch.heartbeat import Heartbeat
from megazero.mpu.watch.job_notes import SilentKeeperError, StoreJobNotes, keeper_of_store
from megazero.mpu.watch.watch import Watch, WatchLimits
from tests.mpu.test_watch import Notes, Spared, close_all
from tests.mpu.test_watch_diagnose import report


def hearts(size: int, patience: float = 60.0) -> list[Heartbeat]:
    job_notes = Notes()
    return [Heartbeat(job_notes, rank, size, f"node{rank}, process 7", patience) for rank in range(size)]


def turns(these: list[Heartbeat], seconds: int) -> list[dict[int, str]]:
    """All that they find in so many seconds."""
    return [text for _ in range(seconds) for each in these if (text := each.turn(1.0))]


def test_ranks_that_beat_are_not_named():
    assert turns(hearts(4), 500) == []


def test_the_first_rank_names_another():
    everyone = hearts(4)
    assert turns(everyone, 10) == []
    living = [each for rank, each in enumerate(everyone) if rank != 2]
    assert turns(living, 55) == []
    found = turns(living, 10)  # the others listen to the first alone
    assert list(found[0]) == [2]
    assert found[0][2].startswith("rank 2 (node2, process 7) has given no sign of life for 6")


def test_all_others_name_the_first():
    everyone = hearts(3)
    assert turns(everyone, 10) == []
    found = turns(everyone[1:], 75)
    assert all(list(each) == [0] for each in found)
    assert found[0][0].startswith("rank 0 (node0, process 7) has given no sign of life for 6")


def test_in_a_larger_job_those_beside_it_in_the_tree_name_a_rank(monkeypatch):
    """Of seven ranks, 1 hears from its children 3 and 4, and they and the first from 1."""
    monkeypatch.setattr(tree, "FAN", 2)
    everyone = hearts(7)
    assert turns(everyone, 10) == []
    found = {rank: turns([everyone[rank]], 75) for rank in (0, 3, 4, 5)}
    beside = {rank: {name for names in each for name in names} for rank, each in found.items()}
    assert beside == {0: {1, 2}, 3: {1}, 4: {1}, 5: {2}}


def test_a_rank_of_a_large_job_asks_for_no_more_and_less_often():
    for size, reads, pause in ((8, 7, 5), (1024, 64, 5), (16384, 64, 15)):
        job_notes, asked = Notes(), []
        job_notes.read_all = lambda keys, asked=asked: asked.append(len(keys)) or [None] * len(keys)
        first = Heartbeat(job_notes, 0, size, "node0, process 7", 60.0)
        for _ in range(60):
            first.turn(1.0)
        assert (max(asked), len(asked)) == (reads, 60 // pause)


def test_a_rank_that_has_not_begun_or_has_left_is_not_missed():
    first, second, third = hearts(3)
    assert turns([first, second], 10) == []  # the third is still starting
    second.leave()
    second.turn(1.0)
    assert turns([first], 500) == []
    third.turn(1.0)
    first.turn(10.0)
    assert [list(each) for each in turns([first], 61)] == [[2]]


def test_who_was_stopped_itself_accuses_nobody():
    """A whole job may be stopped for an hour: the watch counts a few seconds of it."""
    everyone = hearts(2)
    turns(everyone, 10)
    assert [each.turn(16.0) for each in everyone] == [{}, {}]
    assert turns(everyone, 100) == []


def test_before_the_first_step_a_rank_may_be_still_for_long():
    first, second = hearts(2, patience=600.0)
    turns([first, second], 200)
    assert turns([first], 300) == []
    for each in (first, second):
        each.expect(60.0)
    assert turns([first, second], 200) == []
    assert list(turns([first], 70)[0]) == [1]


def test_a_watch_ends_a_job_whose_rank_gives_no_sign(capfd):
    job_notes, endings = Notes(), [Spared(), Spared()]
    watches = [Watch(job_notes, r, 2, WatchLimits(60.0, 0.3, 0.02, 0.4), endings[r]) for r in range(2)]
    time.sleep(0.2)
    for watch in watches:
        watch.under_way()
    silenced = threading.Event()
    watches[1]._heartbeat.turn = lambda awake: silenced.set() or {}
    assert silenced.wait(5)
    assert endings[0].ended.wait(10)
    close_all(watches)
    assert "  * rank 1 (" in (said := capfd.readouterr().err)
    assert "has given no sign of life for" in said


def test_a_closed_watch_is_not_missed():
    job_notes = Notes()
    watches = [Watch(job_notes, r, 2, WatchLimits(60.0, 0.3, 0.02, 0.3), Spared()) for r in range(2)]
    time.sleep(0.2)
    for watch in watches:
        watch.under_way()
    watches[1].close()
    time.sleep(0.8)
    assert watches[0]._alarm is None
    close_all(watches)


def test_the_lowest_rank_that_is_not_still_makes_the_diagnosis_without_waiting(capfd):
    job_notes = Notes()
    summaries: dict[int, str] = {}

    def attend(rank: int) -> None:
        diagnosis = FailureDiagnosis(job_notes, rank, 3, 20.0)
        summaries[rank] = diagnosis.hold(
            report(rank, "world barrier - a.py:1 waited"), {0: "rank 0 stands still"}
        )

    began = time.monotonic()
    threads = [threading.Thread(target=attend, args=(rank,)) for rank in (2, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 10.0
    assert summaries == {1: "rank 0 stands still", 2: "rank 0 stands still"}
    capfd.readouterr()
    # Later the rank goes on: it takes what was found.
    assert FailureDiagnosis(job_notes, 0, 3, 20.0).hold(report(0, "")) == "rank 0 stands still"
    assert capfd.readouterr().err == "megazero: rank 0 ends with its job: rank 0 stands still\n"


class Mute:
    """A store whose keeper is stopped for a while."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.texts: dict[str, str] = {}

    def clone(self) -> Mute:
        return self

    def set(self, key: str, text: str) -> None:
        assert self.goes_on.wait(20)
        self.texts[key] = text

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")


def test_a_store_that_does_not_answer_does_not_hang_who_asks():
    store = Mute()
    job_notes = StoreJobNotes(store, "rank 0 on node7", patience=0.1)
    for text in ("first", "second"):
        with pytest.raises(
            SilentKeeperError,
            match="rank 0 on node7, which keeps the job's key-value store, is stopped or out",
        ):
            job_notes.post("key", text)
    store.goes_on.set()
    job_notes.post("other", "third")
    # What was given up before it began was not done.
    assert store.texts == {"megazero/watch/key": "first", "megazero/watch/other": "third"}
    with pytest.raises(CommunicationError, match="which rank 0 on node7 keeps, is out of reach: Broken pipe"):
        job_notes.read("key")


def test_a_store_is_read_at_many_keys_of_which_some_are_missing():
    job_notes = StoreJobNotes(dist.HashStore())
    assert job_notes.read_all(["a", "b"]) == [None, None]
    job_notes.post("b", "2")
    assert job_notes.read_all(["a", "b"]) == [None, "2"]
    job_notes.post("a", "1")
    assert job_notes.read_all(["a", "b"]) == ["1", "2"]
    assert job_notes.read_all([]) == []


def test_the_thread_of_job_notes_ends_with_them():
    before = {*threading.enumerate()}
    job_notes = StoreJobNotes(dist.HashStore())
    (thread,) = {*threading.enumerate()} - before
    del job_notes
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_keeper_is_known_from_the_launcher():
    assert keeper_of_store({"MASTER_ADDR": "node7"}) == "rank 0 on node7"
    torchrun = {"MASTER_ADDR": "node7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert keeper_of_store(torchrun) == "the launcher's agent on node7"
    assert keeper_of_store({}) == "rank 0"
