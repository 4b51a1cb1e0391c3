"""Law 1 with a teacher: a student learns the same from it on any layout, whatever the teacher's own shape."""

from __future__ import annotations

from functools import cache

import pytest

from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.config.tree.distillation import DistillationConfig
from megazero.mpu.context import solo_context
from megazero.train.pretraining import pretrain_on
from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_alone, run_in_threads, run_in_world
from tests.layouts.layout import Layout

# Wider and deeper than the students; one that is dense and tied, one with experts, a pyramid of them.
TEACHERS = {
    "dense": (Layout(layers=8), {"hidden_size": 48, "ffn_hidden_size": 64}),
    "experts": (
        Layout(layers=8, shape="llama", experts="top2", untied=True),
        {"num_experts": (2, 4), "expert_interval": 4, "fp32_residual_connection": True},
    ),
}


@pytest.fixture(scope="session")
def teachers(tmp_path_factory) -> dict[str, str]:
    """A folder for each, trained for three steps."""
    found = {}
    for name, (layout, shape) in TEACHERS.items():
        folder = str(tmp_path_factory.mktemp("teachers") / name)
        config = layout.config(3)
        model = config.model.model_copy(update=shape)
        pretrain_on(
            config.model_copy(update={"model": model, "checkpoint": CheckpointConfig(save=folder)}),
            solo_context(),
        )
        found[name] = folder
    return found


def distilled(layout: Layout, teacher: str, until: int | None = None) -> Config:
    """The layout's configuration with a teacher; its lessons end within the five steps if `until` says so."""
    distillation = DistillationConfig(
        kd=True, load_teacher=teacher, kd_beta_ce=0.7, kd_temp=2.0, kd_train_iters=until
    )
    return layout.config().model_copy(update={"distillation": distillation})


@cache
def serial(layout: Layout, teacher: str, until: int | None) -> Record:
    return run_alone(distilled(layout, teacher, until))


def check(records: list[Record], layout: Layout, teacher: str, until: int | None) -> None:
    bad = [str(d) for d in compare(records, serial(layout.serial, teacher, until)) if d.share > 1]
    assert not bad, "\n".join(bad)


LAYOUTS = [
    (Layout(tp=2), "dense", None),
    (Layout(tp=4, sequence_parallel=True, zero=1), "experts", 3),
    (Layout(pp=2, schedule="gpipe", micro_batch=2), "experts", None),
    (Layout(pp=2, dp=2, zero=2, recompute="full"), "dense", 3),
    (Layout(pp=2, tp=2, schedule="interleaved", virtual=2, layers=4, shape="llama"), "dense", None),
    (Layout(pp=2, schedule="zb-h1", zero=1, dp=2, micro_batch=2), "experts", 2),
    (Layout(pp=2, tp=2, schedule="zb-v", layers=4, untied=True), "experts", None),
    (Layout(pp=4, layers=4, micro_batch=2, sequence_parallel=True, tp=2), "dense", 3),
    pytest.param(Layout(dp=2, zero=3, shape="llama", untied=True), "experts", None, marks=pytest.mark.fast),
    (Layout(dp=4, zero=3, keep=True, recompute="selective"), "dense", 2),
    (Layout(dp=2, ep=2, experts="top2", zero=2), "experts", 3),
    (Layout(tp=2, dp=2, ep=2, etp=1, experts="residual", zero=1), "dense", None),
    (Layout(pp=2, dp=2, ep=2, experts="biased", schedule="zb-v", layers=4, micro_batch=2), "experts", 3),
    (Layout(tp=2, dropout=0.1, recompute="full"), "experts", None),
]


@pytest.mark.parametrize(
    ("layout", "teacher", "until"), LAYOUTS, ids=lambda x: x.name if isinstance(x, Layout) else str(x)
)
def test_layout_equals_one_process(teachers, layout, teacher, until):
    config = distilled(layout, teachers[teacher], until)
    check(run_in_threads(config, layout.grid), layout, teachers[teacher], until)


@pytest.mark.slow
@pytest.mark.gloo
def test_processes_equal_one_process(pool, teachers):
    layout = Layout(tp=2, pp=2, zero=1, micro_batch=2)
    config = distilled(layout, teachers["experts"], 3)
    records = pool.run(run_in_world, layout.world_size, config, layout.grid)
    check(records, layout, teachers["experts"], 3)


def test_the_teacher_is_heard_until_the_lessons_end(teachers):
    """The loss has its divergence while it teaches; what was learned stays."""
    layout = Layout()
    record, plain = serial(layout.serial, teachers["dense"], 3), run_alone(layout.serial.config())
    assert [list(losses) for losses in record.losses] == [
        *[["lm loss", "kd loss", "total loss"]] * 3,
        *[["lm loss"]] * 2,
    ]
    for losses in record.losses[:3]:
        expected = losses["lm loss"] + 0.7 * 4 * losses["kd loss"]
        assert losses["total loss"] == pytest.approx(expected, rel=1e-9)
        assert losses["kd loss"] > 0.01
    assert record.losses[0]["lm loss"] == plain.losses[0]["lm loss"]
    assert record.losses[4]["lm loss"] != pytest.approx(plain.losses[4]["lm loss"], rel=1e-4)


def test_a_model_has_nothing_to_learn_from_itself(teachers, tmp_path):
    """A student that begins as its teacher: the divergence is 0, and so is its gradient."""
    layout, _ = TEACHERS["dense"]
    config = layout.serial.config(3)
    alone = run_alone(config, 1)
    saved = config.model_copy(update={"checkpoint": CheckpointConfig(save=str(tmp_path))})
    rate = config.optimizer.model_copy(update={"lr": 1e-30, "weight_decay": 0.0})
    pretrain_on(saved.model_copy(update={"optimizer": rate}), solo_context())
    found = run_alone(distilled(layout.serial, str(tmp_path)), 1)
    assert found.losses[0]["kd loss"] == pytest.approx(0.0, abs=1e-6)
    for name, gradient in alone.gradients[0].items():
        difference = (found.gradients[0][name] - gradient).abs().max()
        assert difference <= 1e-5 * alone.grad_norms[0], name
