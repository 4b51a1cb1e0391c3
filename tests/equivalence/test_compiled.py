"""Law 1 for compiled layers: what torch.compile makes of them trains as one process without it does."""

from __future__ import annotations

import pytest
import torch

from megazero.config.training_plan import training_plan_of
from megazero.errors import ConfigError
from megazero.layers.compiled import compile_layers
from megazero.mpu.context import solo_context
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.equivalence.one_process import check_as_threads
from tests.layouts.layout import Layout

TRACED = {"compiled": "aot_eager", "samples": 4}
LAYOUTS = (
    Layout(pp=2, dropout=0.1, recompute="full", zero=2, **TRACED),
    Layout(shape="bert", packed=True, **TRACED),
)
# Two minutes together.
MORE_LAYOUTS = (
    Layout(shape="llama", recompute="selective", zero=3, dp=2, dropout=0.1, **TRACED),
    Layout(tp=2, sequence_parallel=True, dropout=0.1, zero=1, **TRACED),
    Layout(tp=2, sequence_parallel=True, variant="olmo", **TRACED),
    Layout(variant="qwen", recompute="selective", dropout=0.1, **TRACED),
    Layout(variant="gemma", shape="llama", **TRACED),
    Layout(variant="gpt-oss", shape="llama", **TRACED),
)


def counters():
    """What the compiler has counted. Its module takes seconds to import."""
    from torch._dynamo.utils import counters

    return counters


@pytest.fixture(autouse=True)
def forgotten():
    """What is compiled for one test is not for another."""
    torch._dynamo.reset()
    counters().clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in MORE_LAYOUTS)],
    ids=lambda layout: layout.name,
)
def test_compiled_layers_train_like_one_process(layout):
    check_as_threads(layout)
    assert counters()["stats"]["unique_graphs"] > 0


def losses_of(config, steps=2):
    context = solo_context()
    training_plan = training_plan_of(config, 1)
    engine = verification_engine(config, training_plan, context)
    found = []
    for number in range(steps):
        progress = training_plan.before(number)
        batches = micro_batches(config, context, training_plan.at(progress))
        result = engine.train_step(batches, progress, Timers())
        found.append((result.losses.total, result.grad_norm))
    return found


def test_all_layers_share_one_graph_without_breaks():
    """A layer's number was once a constant of its graph, so each was compiled, and from the ninth on none."""
    config = Layout(layers=10, dropout=0.1, compiled="eager", samples=2).config()
    losses_of(config)
    assert counters()["stats"]["unique_graphs"] == 1
    assert not counters()["graph_break"]


@pytest.mark.slow
def test_no_length_of_a_curriculum_is_left_uncompiled():
    """From the ninth length on layers ran as they are, and one line in the log said so."""
    for length in range(8, 30, 2):
        losses_of(Layout(layers=1, compiled="eager", samples=1, sequence=length).config(), steps=1)
    assert counters()["stats"]["unique_graphs"] == 11


def test_layers_of_a_kind_share_a_graph_in_a_hybrid_model():
    losses_of(Layout(letters="M", layers=10, compiled="eager", samples=2).config())
    assert counters()["stats"]["unique_graphs"] == 1
    assert not counters()["graph_break"]


def test_a_compiler_that_is_missing_is_named(monkeypatch):
    chunk = next(iter(engine_of(Layout()).executor.chunks.values()))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError) as error:
        compile_layers(chunk.blocks(), "inductor")
    assert str(error.value) == (
        "`compile` must be off where a C++ compiler is not installed, but is on; install it, or leave "
        "`--compile` out"
    )


def engine_of(layout):
    config = layout.config()
    return verification_engine(config, training_plan_of(config, 1), solo_context())


def test_evaluations_are_not_compiled():
    config = Layout(compiled="eager", samples=2).config()
    engine = engine_of(Layout(compiled="eager", samples=2))
    training_plan = training_plan_of(config, 1)
    engine.evaluate([micro_batches(config, solo_context(), training_plan.at(training_plan.before(0)))])
    assert counters()["stats"]["unique_graphs"] == 0
