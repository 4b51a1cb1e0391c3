"""Calls that return when they are queued on the device, as NCCL's do: open until the device has finished."""

from __future__ import annotations

import gc
import re
import time
import weakref
from functools import partial

import pytest
import torch

from megazero.errors import CommunicationError
from megazero.mpu.group import Transfer
from megazero.mpu.watch import queued
from megazero.mpu.watch import watch as watch_module
from megazero.mpu.watch.group import watched
from megazero.mpu.watch.log import CallLog, Channel
from megazero.mpu.watch.queued import QueuedCalls
from megazero.mpu.watch.report import CallState
from megazero.mpu.watch.watch import Watch, WatchLimits
from tests.mpu.test_watch import Notes, Slow, Spared, close_all, keep_calling


class Device:
    """A queue of work: how much it has been given, and how much it has done; it may fail."""

    def __init__(self) -> None:
        self.given, self.done, self.marks = 0, 0, 0
        self.error: str | None = None

    def catch_up(self) -> None:
        self.done = self.given


class Mark:
    """In place of a CUDA event."""

    def __init__(self, device: Device):
        self.device, self.at = device, 0
        device.marks += 1

    def record(self) -> None:
        self.at = self.device.given

    def query(self) -> bool:
        if self.device.error is not None:
            raise RuntimeError(self.device.error)
        return self.at <= self.device.done


class Queued:
    """A work of NCCL's: waiting for it returns at once."""

    def __init__(self, result: torch.Tensor):
        self.result = result

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        return None


class OverNccl(Slow):
    """A group whose calls are given to a device."""

    def __init__(self, device: Device):
        super().__init__(None)
        self.device = device

    def all_reduce(self, tensor, op="sum", *, async_op=False):
        self.device.given += 1
        return Queued(tensor)

    def exchange(self, transfers):
        self.device.given += 1
        return [Queued(transfer.tensor) for transfer in transfers]


def two(device: Device, ending: Spared, timeout: float = 20.0, grace: float = 5.0) -> list[Watch]:
    limits, notes = WatchLimits(timeout, grace, 0.02), Notes()
    return [Watch(notes, rank, 2, limits, ending, new_mark=partial(Mark, device)) for rank in range(2)]


def state(watch: Watch) -> CallState:
    return watch._log.records()[-1].state


def until(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("async_op", [False, True])
def test_a_call_stays_open_until_the_device_has_finished_it(async_op):
    device = Device()
    watches = two(device, Spared())
    work = watched(OverNccl(device), watches[0]).all_reduce(torch.zeros(2), async_op=async_op)
    if async_op:
        assert state(watches[0]) is CallState.OPEN
        work.wait()
    time.sleep(0.1)
    assert state(watches[0]) is CallState.RETURNED
    device.catch_up()
    until(lambda: state(watches[0]) is CallState.DONE)
    assert watches[0]._log.pending == {}
    close_all(watches)


@pytest.mark.parametrize("async_op", [False, True])
def test_a_call_that_the_device_never_finishes_names_who_is_missing(capfd, async_op):
    """A wait over NCCL makes the stream wait: the call counted as done, and a stuck job hung in silence."""
    device, ending = Device(), Spared()
    first, second = two(device, ending, timeout=0.2, grace=0.5)
    watched(OverNccl(device), first).all_reduce(torch.zeros(2), async_op=async_op).wait()
    with pytest.raises(CommunicationError, match=r"rank 1 never came to call 1 of group `tp` \(ranks 0, 1\)"):
        keep_calling(second)
    assert ending.ended.wait(10)  # the main thread of rank 0 may be in a read from the device
    said = capfd.readouterr().err
    assert re.search(
        r"rank 0: on the device, in call 1 of group `tp` \(ranks 0, 1\): all_reduce\(sum\) \[2\] float32 at "
        r"tests/mpu/test_queued.py:\d+ \(.*\) \[all_reduce\(sum\) took more than 0.2 s on the device\]; its "
        r"main thread is at \S+:\d+ in \w+",
        said,
    )
    close_all([first, second])


def test_messages_are_followed_too(capfd):
    device = Device()
    first, second = two(device, Spared(), timeout=0.2, grace=0.5)
    (work,) = watched(OverNccl(device), first).exchange([Transfer("recv", torch.zeros(6), 1)])
    work.wait()
    with pytest.raises(
        CommunicationError, match="rank 1 never came to call 1 of the messages from rank 1 to"
    ):
        keep_calling(second)
    close_all([first, second])


def test_the_oldest_call_that_the_device_has_not_finished_is_the_one_that_is_named(capfd):
    device = Device()
    first, second = two(device, Spared(), timeout=0.3, grace=0.5)
    group = watched(OverNccl(device), first)
    for _ in range(5):
        group.all_reduce(torch.zeros(2))
    device.done = 3
    with pytest.raises(CommunicationError):
        keep_calling(second)
    assert "rank 0: on the device, in call 4 of group `tp`" in capfd.readouterr().err
    close_all([first, second])


def test_a_slow_device_is_in_nobodys_way():
    device = Device()
    watches = two(device, Spared(), timeout=0.3)
    group = watched(OverNccl(device), watches[0])
    for _ in range(20):
        group.all_reduce(torch.zeros(2))
        time.sleep(0.05)  # in all, more than a call may take
        device.done = device.given - 2
    assert [watch._alarm for watch in watches] == [None, None]
    close_all(watches)


def test_the_result_of_a_call_is_not_held():
    """A work of NCCL's holds it, and the device may be far behind."""
    device = Device()
    watches = two(device, Spared())
    work = watched(OverNccl(device), watches[0]).all_reduce(result := torch.zeros(2), async_op=True)
    held = weakref.ref(result)
    work.wait()
    del work, result
    gc.collect()
    assert held() is None
    assert state(watches[0]) is CallState.RETURNED
    close_all(watches)


def test_the_queue_is_as_long_as_the_device_is_behind(monkeypatch):
    monkeypatch.setattr(queued, "_LONG", 16)
    device, log, channel = Device(), CallLog(), Channel("tp", "tp", (0, 1))
    calls = QueuedCalls(log, partial(Mark, device))
    for n in range(1000):
        device.given += 1
        device.done = n - 3
        calls.add(log.begin(channel, "barrier", None, None, None))
        assert len(calls) == len(log.pending) <= 17
    assert device.marks <= 17  # they are used again
    device.catch_up()
    calls.settle()
    assert len(calls) == len(log.pending) == 0


def test_a_device_that_fails_is_told_if_the_main_thread_does_not_say_more(capfd):
    device = Device()
    first, second = two(device, Spared(), grace=0.3)
    watched(OverNccl(device), first).all_reduce(torch.zeros(2))
    device.error = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(CommunicationError, match="rank 0: its device failed: CUDA error: an illegal memory"):
        keep_calling(second)
    close_all([first, second])


@pytest.mark.parametrize("behind", [False, True])
def test_after_a_failure_a_device_that_is_behind_does_not_keep_the_process(behind):
    """Its end would wait for what is queued there, and nobody would watch any more."""
    device, ending = Device(), Spared()
    first, second = two(device, ending, timeout=0.2)
    watched(OverNccl(device), first).all_reduce(torch.zeros(2))
    with pytest.raises(CommunicationError):
        keep_calling(second)
    if not behind:
        device.catch_up()
    first._ending = Spared()
    close_all([first, second])
    assert first._ending.said == (["cancel", "prepare"] if behind else ["cancel"])


@pytest.mark.parametrize(("error", "recorded"), [(ValueError("no"), False), (CommunicationError("no"), True)])
def test_the_flight_recorder_is_named_unless_the_cause_is_known(monkeypatch, capfd, error, recorded):
    monkeypatch.setattr(watch_module, "write_flight_record", lambda rank: "the recorder of each rank")
    watches = two(Device(), Spared())
    watches[1].report(error)  # rank 0 is told, and makes the diagnosis
    close_all(watches)
    assert capfd.readouterr().err.count("\n  the recorder of each rank\n") == int(recorded)


def test_without_marks_a_call_that_has_returned_is_done():
    """As over Gloo."""
    watch = Watch(Notes(), 0, 1, WatchLimits(20.0))
    group = watched(OverNccl(Device()), watch)
    group.all_reduce(torch.zeros(2))
    assert state(watch) is CallState.DONE
    group.all_reduce(torch.zeros(2), async_op=True).wait()
    assert state(watch) is CallState.DONE
