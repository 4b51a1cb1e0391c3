from __future__ import annotations

import itertools

import pytest

from megazero.train.step.timers import Timers


class Clock:
    """A clock that each reading moves on by one second."""

    def __init__(self):
        self.readings = itertools.count()

    def __call__(self):
        return float(next(self.readings))


def test_phases_add_up_until_collected():
    timers = Timers(clock=Clock())
    for _ in range(3):
        with timers("data"):
            pass
    with timers("optimizer"):
        pass
    assert timers.collect() == {"data": 3.0, "optimizer": 1.0}
    assert timers.collect() == {}


def test_phases_nest():
    timers = Timers(clock=Clock())
    with timers("evaluation"), timers("data"):
        pass
    assert timers.collect() == {"data": 1.0, "evaluation": 3.0}


def test_a_phase_that_raises_is_counted_and_the_error_rises():
    timers = Timers(clock=Clock())
    with pytest.raises(KeyError), timers("save"):
        raise KeyError("x")
    assert timers.collect() == {"save": 1.0}


@pytest.mark.parametrize(
    ("device", "synchronize", "waits"), [("cuda", True, 2), ("cuda", False, 0), ("cpu", True, 0)]
)
def test_cuda_is_waited_for_only_when_asked(monkeypatch, device, synchronize, waits):
    waited = []
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    timers = Timers(device, synchronize=synchronize)
    with timers("optimizer"):
        pass
    assert len(waited) == waits
