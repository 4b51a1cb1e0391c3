"""What calls wait is added up: on the host, or by events in the device's stream."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch

from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.waits import Waits
from megazero.mpu.watch.group import watched
from megazero.mpu.watch.watch import Watch, WatchLimits
from tests.mpu.test_watch import Notes, Pending, Slow, Spared


def test_a_rank_that_comes_first_waits_and_the_last_does_not():
    world, job_notes = ThreadWorld(2, timeout=20), Notes()
    watches = [Watch(job_notes, rank, 2, WatchLimits(20.0, poll=0.02), Spared()) for rank in range(2)]

    def work(rank: int) -> float:
        group, waits = watched(world.group("g", rank, (0, 1)), watches[rank]), watches[rank].waits
        waits.start_step()
        for call in (lambda: group.all_reduce(torch.ones(2)), group.barrier):
            time.sleep(0.05 * rank)
            call()
        return waits.end_step().seconds

    first, last = world.run(work)
    assert first > 0.09
    assert last < 0.05
    for watch in reversed(watches):  # rank 0 waits for the others
        watch.close()


class Sluggish(Pending):
    """A work whose `wait` takes 20 ms."""

    def wait(self) -> None:
        time.sleep(0.02)


def test_a_call_that_is_started_waits_as_long_as_its_wait_takes():
    watch = Watch(Notes(), 0, 1, WatchLimits(20.0))
    work = watched(Slow(Sluggish()), watch).all_reduce(torch.ones(2), async_op=True)
    assert watch.waits.end_step().seconds < 0.01
    work.wait()
    assert watch.waits.end_step().seconds > 0.02


@dataclass
class Stream:
    """A device's clock, in ms, and what it has done."""

    now: float = 0.0
    done: float = 0.0


class Event:
    def __init__(self, stream: Stream):
        self.stream, self.at = stream, 0.0

    def record(self) -> None:
        self.at = self.stream.now

    def query(self) -> bool:
        return self.at <= self.stream.done

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_on_cuda_events_are_recorded_in_one_step_of_ten_and_nobody_waits_for_them():
    stream, made = Stream(), []

    def new() -> Event:
        made.append(Event(stream))
        return made[-1]

    waits, found = Waits("cuda", new), []
    for _ in range(20):
        waits.start_step()
        for milliseconds in (3.0, 4.0):
            began = waits.begin()
            stream.now += milliseconds
            waits.end(began)
            stream.now += 1.0
        found.append(waits.end_step())
    waits.end(waits.begin())  # in an evaluation, between steps
    assert [number for number, each in enumerate(found) if each is not None] == [0, 10]
    assert len(made) == 8
    assert found[10].seconds is None
    stream.done = stream.now
    assert found[10].seconds == pytest.approx(0.007)
