"""Copies beside what the device computes are ordered with it, whatever is offloaded; faults in that show.

The whole sweep, over the layouts that law 1 is held over, is `proofs/stream_order.py`.
"""

from __future__ import annotations

import pytest
import torch

from megazero.mpu.slab import Slab
from tests.streams import plants
from tests.streams.order import Order
from tests.streams.plants import PLANTS, Plant
from tests.streams.recorder import Recorder, RecordingStreams, WaitingStreams
from tests.streams.runs import Run, races, record

CLEAN = (
    plants.ON_HOST,
    plants.ON_DISK,
    plants.HALF,
    plants.INPUTS,
    plants.SAVED,
    plants.DELAYED,
    # A slice read for nothing, as its layer was skipped, once left the device while it arrived there:
    # the pair of it and its point was let go of before the point's method was called.
    plants.UNUSED,
)
FEW = {plant.name for plant in PLANTS[::3]}


def order_of(*accesses: tuple[str, int, int, bool]) -> Order:
    order = Order()
    for agent, start, stop, writes in accesses:
        order.access(agent, "memory", start, stop, writes=writes, what="w" if writes else "r")
    return order


@pytest.mark.fast
def test_only_pairs_that_touch_and_change_and_are_unordered_are_races():
    assert order_of(("a", 0, 4, True), ("b", 4, 8, True)).races == {}
    assert order_of(("a", 0, 4, False), ("b", 0, 4, False)).races == {}
    assert order_of(("a", 0, 4, True), ("a", 0, 4, True)).races == {}
    assert order_of(("a", 0, 5, True), ("b", 4, 8, False)).races == {("a: w", "b: r"): 1}
    order = order_of(("a", 0, 4, True))
    order.after("b", order.now("a"))
    order.after("c", order.now("b"))  # over two
    order.access("c", "memory", 0, 4, writes=True, what="w")
    assert order.races == {}
    order.access("a", "memory", 0, 1, writes=False, what="r")  # c came after a, not a after c
    assert order.races == {("c: w", "a: r"): 1}


@pytest.mark.fast
def test_a_copy_is_recorded_on_its_own_stream():
    recorder = Recorder()
    streams = RecordingStreams(recorder)
    with recorder.on_thread():
        x = torch.ones(8, device="cpu")
        there = Slab(streams).take(32).view(torch.float32)
        point = streams.copy(there, x)
        assert recorder.order.races == {}
        x.add_(1)
        there.sum()
        assert set(recorder.order.races) == {
            ("copy: copied", "compute: aten::add_"),
            ("copy: copied to", "host: aten::sum"),
        }
        recorder.order.races.clear()
        point.host_waits()
        there.sum()
        x.add_(1)  # it is queued by the host, which has waited
        assert recorder.order.races == {}
        assert there.tolist() == [1.0] * 8


@pytest.mark.parametrize("run", [pytest.param(run, id=run.name) for run in CLEAN])
def test_nothing_is_unordered_and_no_bit_depends_on_it(run: Run):
    recorded, plain = record(run), record(run, watched=False)
    assert races(recorded) == []
    for one, other in zip(recorded, plain, strict=True):
        assert one.recorder.order.accesses > 1000
        assert one.recorder.copied > 0
        assert one.losses == other.losses
        assert all(torch.equal(one.weights[name], weight) for name, weight in other.weights.items())


@pytest.mark.fast
def test_copies_leave_the_queue_of_what_is_computed():
    """Of the copies of a step with everything on the host, none is left there."""
    before = record(plants.ON_HOST, streams=WaitingStreams)[0].recorder
    after = record(plants.ON_HOST)[0].recorder
    assert before.copied == 0
    assert after.blocking == {}
    assert sum(before.blocking.values()) > 100
    assert after.copied >= before.blocking_bytes > 0


@pytest.mark.parametrize(
    "plant",
    [pytest.param(x, id=x.name, marks=[pytest.mark.slow] * (x.name not in FEW)) for x in PLANTS],
)
def test_a_fault_in_the_order_is_found(plant: Plant):
    with plant.planted():
        assert races(record(plant.run))


def test_many_faults_of_every_kind_are_planted():
    assert len({plant.name for plant in PLANTS}) == len(PLANTS) >= 15
    assert len({plant.run.name for plant in PLANTS}) >= 8
