"""Law 1 for T5: any layout trains the same encoder and decoder as one process, on pairs of uneven lengths."""

from __future__ import annotations

import pytest
from torch import Tensor

from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.mpu.context import solo_context
from megazero.verify.compare import compare
from megazero.verify.record import micro_batches
from megazero.verify.run import run_in_threads
from proofs.reshard_sweep import Case
from proofs.reshard_sweep import check as resharded
from tests.equivalence.one_process import Sweep, check_as_processes, check_as_threads, serial
from tests.layouts.layout import PAIRS, Layout
from tests.layouts.selection import pair_layouts

SWEEP = Sweep(pair_layouts, 14, 120, every=0, few_ranks=2)


def pytest_generate_tests(metafunc):
    SWEEP.parametrize(metafunc)


def test_layout_equals_one_process(selected):
    check_as_threads(selected)


def test_the_selections_hold_every_setting_and_every_pair_of_them():
    expected = {
        "tp": {1, 2, 4},
        "pp": {1, 2, 4},
        "dp": {1, 2},
        "schedule": {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"},
        "zero": {0, 1, 2, 3},
        "sequence_parallel": {False, True},
        "recompute": {"none", "full", "selective"},
        "micro_batch": {1, 2, 4},
        "shape": set(PAIRS),
        "untied": {False, True},
        "dropout": {0.0, 0.1},
        "optimizer": {"adam", "lamb"},
    }
    SWEEP.few_have(expected)
    SWEEP.holds_every_pair(expected, least=120, slow=True)


def test_what_the_samples_are():
    config, context = Layout(shape="t5").config(), solo_context()
    batches = micro_batches(config, context, training_plan_of(config, 1).at(Progress()))
    for sizes in ([b.tokens.shape[1] for b in batches], [b.decoder.tokens.shape[1] for b in batches]):
        assert len(set(sizes)) > 1 or max(sizes) <= 8
    assert any(batch.mask is not None for batch in batches)
    assert len({batch.counts["lm"] for batch in batches}) > 3


@pytest.mark.parametrize("shape", PAIRS)
def test_every_weight_moves(shape):
    record = serial(Layout(shape=shape).serial)
    first, last = record.weights[0], record.weights[-1]
    assert all(not first[name].equal(last[name]) for name in first)
    biases = {"encoder.relative_bias.weight", "decoder.relative_bias.weight"}
    assert (biases <= first.keys()) == (shape == "t5")
    assert ("head.bias" in first) == (shape == "t5-megatron")


@pytest.mark.parametrize("change", [{"shape": "t5-megatron"}, {"untied": True}, {"dropout": 0.1}], ids=str)
def test_each_setting_of_the_model_does_something(change):
    plain, other = Layout(shape="t5").serial, Layout(**{"shape": "t5", **change}).serial
    assert abs(serial(plain).losses[-1]["lm loss"] - serial(other).losses[-1]["lm loss"]) > 1e-4


@pytest.mark.parametrize("stage", range(3))
def test_a_copy_of_the_biases_that_differs_is_seen(stage):
    layout = Layout(shape="t5", pp=3, micro_batch=4)
    records = run_in_threads(layout.config(), layout.grid)
    name = "encoder.relative_bias.weight"
    name = f"copy of {name}" if stage else name
    wrong: Tensor = records[stage].weights[2][name]
    wrong.view(-1)[3] += 1e-3
    bad = [d for d in compare(records, serial(layout.serial)) if d.share > 1]
    assert [(d.kind, name in d.where) for d in bad] == [("weights", True), ("tied copies", True)]


@pytest.mark.parametrize("shape", PAIRS)
def test_a_checkpoint_of_one_layout_is_continued_on_others(tmp_path, shape):
    plain = Layout(shape=shape)
    around = (
        plain,
        Layout(shape=shape, pp=4, zero=1),
        Layout(shape=shape, tp=2, pp=2, sequence_parallel=True, schedule="zb-v"),
        Layout(shape=shape, dp=2, zero=3, micro_batch=2),
    )
    assert resharded([*map(Case, around)], tmp_path).wrong == ()


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout",
    [
        Layout(shape="t5", tp=2, sequence_parallel=True, micro_batch=2, backend="gloo"),
        Layout(shape="t5", pp=4, zero=1, micro_batch=2, optimizer="lamb", backend="gloo"),
    ],
    ids=lambda layout: layout.name,
)
def test_processes_equal_one_process(pool, layout):
    check_as_processes(pool, layout)
