"""Law 1 for BERT: any layout trains the same model as one process, with both losses and with uneven samples.

The samples have lengths of their own, uneven numbers of masked tokens, and one of them has none: where a
micro-batch is one sample, nothing in it counts for the first loss.
"""

from __future__ import annotations

import pytest
from torch import Tensor

from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.mpu.context import solo_context
from megazero.verify.compare import compare
from megazero.verify.record import micro_batches
from megazero.verify.run import run_in_threads
from tests.equivalence.one_process import Sweep, check_as_processes, check_as_threads, serial
from tests.layouts.layout import ENCODERS, Layout
from tests.layouts.selection import encoder_layouts

SWEEP = Sweep(encoder_layouts, 30, 120, every=3, few_ranks=2)


def pytest_generate_tests(metafunc):
    SWEEP.parametrize(metafunc)


def test_layout_equals_one_process(selected):
    check_as_threads(selected)


def test_the_selections_hold_every_pair_of_settings():
    expected = {
        "tp": {1, 2, 4},
        "pp": {1, 2, 4},
        "dp": {1, 2},
        "schedule": {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"},
        "zero": {0, 1, 2, 3},
        "sequence_parallel": {False, True},
        "recompute": {"none", "full", "selective"},
        "micro_batch": {1, 2, 4},
        "shape": set(ENCODERS),
        "untied": {False, True},
        "binary_head": {False, True},
        "dropout": {0.0, 0.1},
        "packed": {False, True},
        "optimizer": {"adam", "lamb"},
    }
    SWEEP.few_have(expected)
    SWEEP.holds_every_pair(expected, least=120)


def test_what_the_samples_are():
    """Uneven in every way, and one micro-batch of one sample has nothing to restore."""
    layout = Layout(shape="bert")
    config, context = layout.config(), solo_context()
    batches = micro_batches(config, context, training_plan_of(config, 1).at(Progress()))
    masked = [batch.counts["lm"] for batch in batches]
    assert masked[4] == 0
    assert len(set(masked)) > 3
    assert len({batch.padding for batch in batches}) > 3
    assert {int(batch.targets.is_random) for batch in batches} == {0, 1}
    assert all(batch.counts["sop"] == 1 for batch in batches)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": "bert-original"},
        {"untied": True},
        {"dropout": 0.1},
        {"optimizer": "lamb"},
        {"binary_head": False},
    ],
    ids=lambda change: "-".join(map(str, change.values())),
)
def test_each_setting_of_the_model_does_something(change):
    plain, other = Layout(shape="bert").serial, Layout(**{"shape": "bert", **change}).serial
    assert abs(serial(plain).losses[-1]["lm loss"] - serial(other).losses[-1]["lm loss"]) > 1e-4


def test_both_tasks_are_learnt_from_and_every_weight_moves():
    record = serial(Layout(shape="bert").serial)
    first, last = record.weights[0], record.weights[-1]
    assert all(not first[name].equal(last[name]) for name in first)
    assert {"pooler.weight", "binary_head.weight", "head.dense.weight", "head.bias"} <= first.keys()
    assert "embedding.token_type.weight" in first
    assert [*record.losses[0]] == [
        "lm loss",
        "sop loss",
        "lm_accuracy",
        "sop_accuracy",
        "padding",
        "total loss",
    ]
    for losses in record.losses:
        assert losses["total loss"] == pytest.approx(losses["lm loss"] + losses["sop loss"])
    assert all(norm > 0.5 for norm in record.grad_norms), "clipping is not active"


@pytest.mark.parametrize("name", ["head.dense.weight", "pooler.bias", "embedding.token_type.weight"])
def test_a_difference_is_seen(name):
    layout = Layout(shape="bert", tp=2, sequence_parallel=True, micro_batch=4)
    records = run_in_threads(layout.config(), layout.grid)
    wrong: Tensor = records[1].gradients[2][name]
    wrong.view(-1)[3] += 1e-4
    bad = [d for d in compare(records, serial(layout.serial)) if d.share > 1]
    assert [(d.kind, d.where) for d in bad] == [("gradients", f"{name}, step 2")]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=2, micro_batch=2, backend="gloo"),
        Layout(tp=2, sequence_parallel=True, untied=True, micro_batch=2, backend="gloo"),
        Layout(tp=2, dp=2, sequence_parallel=True, recompute="full", dropout=0.1, zero=3, micro_batch=2),
        Layout(pp=2, zero=1, packed=True, micro_batch=4),
        Layout(pp=2, dp=2, zero=2, schedule="zb-h1", optimizer="lamb", micro_batch=2, backend="gloo"),
        Layout(
            pp=2, tp=2, sequence_parallel=True, schedule="zb-v", layers=4, binary_head=False, micro_batch=2
        ),
        Layout(pp=4, schedule="interleaved", virtual=2, layers=8, micro_batch=2),
        Layout(tp=4, recompute="selective", optimizer="lamb", packed=True, micro_batch=4),
    ],
    ids=lambda layout: layout.name,
)
@pytest.mark.parametrize("shape", ENCODERS[1:])
def test_processes_equal_one_process(pool, layout, shape):
    layout = Layout(**{**vars(layout), "shape": shape})
    check_as_processes(pool, layout)
