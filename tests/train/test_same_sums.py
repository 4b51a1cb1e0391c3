"""A resumed run says if it adds up in another way than the run before."""

from __future__ import annotations

from functools import partial

import pytest

from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.parallel import ParallelConfig
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume import resume as module
from megazero.train.resume.facts import RunFacts
from megazero.train.resume.fit import changed_sums
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.state import TrainState
from megazero.verify.record import verification_engine
from tests.layouts.layout import VOCABULARY, Layout

SHARED, GLOO = "shared memory", "gloo"


def facts(written_by: dict | None) -> RunFacts:
    """What a checkpoint of two slices says."""
    content = {
        "config": {"parallel": ParallelConfig(tensor_model_parallel_size=2).model_dump(mode="json")},
        "state": {"iteration": 1, "consumed_samples": 1, "consumed_tokens": 1, "skipped": 0},
        **{"scaler": None, "updates": None, "stream_seed": 1, "global_batch_size": 1},
    }
    return RunFacts.model_validate(content | ({} if written_by is None else {"written_by": written_by}))


def told(written_by: dict | None, now: dict[str, str], *, tp: int = 2, ranks: int = 4) -> list[str]:
    return changed_sums(facts(written_by), ParallelConfig(tensor_model_parallel_size=tp), now, ranks)


def test_what_changed_is_told_once_for_all_groups():
    before = {"world_size": 4, "transports": {"tp": SHARED, "data": SHARED, "world": GLOO}}
    (remark,) = told(before, {"tp": GLOO, "data": GLOO, "world": GLOO})
    assert remark.startswith("sums over tp, data go over gloo now, and went over shared memory before the")
    assert "last bits may differ" in remark
    assert len(told(before, {"tp": GLOO, "data": SHARED, "world": SHARED})) == 2


@pytest.mark.parametrize(
    "written_by",
    [
        None,  # as by earlier versions
        {"world_size": 4, "git": None},
        {"world_size": 4, "transports": {"tp": GLOO}},
        {"world_size": 8, "transports": {"tp": SHARED}},
    ],
)
def test_nothing_is_said_where_nothing_is_known_or_changed_or_the_layout_is_another(written_by):
    assert told(written_by, {"tp": GLOO, "data": GLOO}) == []


def test_nothing_is_said_about_other_slices():
    before = {"world_size": 4, "transports": {"data": SHARED}}
    assert told(before, {"data": GLOO}, tp=1) == []
    assert len(told(before, {"data": GLOO})) == 1


def test_a_resume_over_other_groups_says_so(tmp_path, monkeypatch):
    layout, world = Layout(dp=2, layers=1), ThreadWorld(2)
    checkpoint = CheckpointConfig(save=str(tmp_path), load=str(tmp_path))
    config = layout.config().model_copy(update={"checkpoint": checkpoint})
    training_plan = training_plan_of(config, 2)

    def save(rank: int) -> None:
        context = thread_context(world, layout.grid, rank)
        engine = verification_engine(config, training_plan, context)
        snapshots = Snapshots(config, training_plan, engine, context, VOCABULARY, 1)
        snapshots.save(TrainState(Progress(1, 4, 4)))
        snapshots.saver.close()

    def load(rank: int) -> tuple[str, ...]:
        context = thread_context(world, layout.grid, rank)
        return resume(config, context, VOCABULARY, partial(verification_engine, context=context)).remarks

    world.run(save)
    assert [len(remarks) for remarks in world.run(load)] == [1, 1]
    monkeypatch.setattr(module, "transports", lambda context: {"data": GLOO, "world": "one process"})
    for _, remark in world.run(load):
        assert remark.startswith("sums over data go over gloo now, and went over one process before")
