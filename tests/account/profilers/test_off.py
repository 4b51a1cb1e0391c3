"""A run without profilers calls none, and a section that is there but off is off."""

from __future__ import annotations

import json

import pytest

from megazero.account.profiler import Profiler
from megazero.account.profilers.build import Profilers, profiler_of
from megazero.account.profilers.group import ObservedGroup
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.pipeline.executor import Executor
from tests.account.profilers.runs import config_of, train

OFF = {
    "train_micro_batch_size_per_gpu": 2,
    "comms_logger": {"enabled": False, "verbose": True, "prof_all": True},
    "flops_profiler": {"enabled": False, "profile_step": 2, "detailed": True, "output_file": "flops.txt"},
    "wall_clock_breakdown": False,
}


@pytest.fixture
def off(tmp_path) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(OFF))
    return f"--deepspeed --deepspeed_config {path}"


def test_a_section_that_is_not_enabled_asks_for_nothing(off: str) -> None:
    """DeepSpeed's comms logger is on wherever its section is."""
    assert type(profiler_of(config_of(off), solo_context())) is Profiler
    on = config_of("--comms-logger --flops-profiler --wall-clock-breakdown")
    assert isinstance(profiler_of(on, solo_context()), Profilers)


def test_nothing_is_wrapped_hooked_or_observed(off: str, monkeypatch, tmp_path) -> None:
    def never(*given: object, **more: object) -> None:
        raise AssertionError("a profiler is at work")

    observers = []
    monkeypatch.setattr(ObservedGroup, "__init__", never)
    monkeypatch.setattr(Profilers, "__init__", never)
    step = Executor.train

    def noted(self, *given):
        observers.append(self.observer)
        return step(self, *given)

    monkeypatch.setattr(Executor, "train", noted)
    train(off, tmp_path / "profile", tp=2)
    assert observers == [None] * 8
    assert not (tmp_path / "profile").exists()


def test_the_context_is_the_same() -> None:
    context = thread_context(ThreadWorld(2), ProcessGrid(tp=2), 0)
    assert Profiler().watched(context) is context
