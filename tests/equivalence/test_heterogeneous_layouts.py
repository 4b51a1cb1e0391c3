"""Law 1 for layers of sizes of their own: the same training however they are sliced and dealt to stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megazero.verify.compare import compare
from megazero.verify.run import run_alone, run_in_threads
from tests.equivalence.one_process import check, check_as_processes, check_as_threads, serial
from tests.layouts.layout import WIDTHS, Layout

UNEVEN, HALVES = Layout(widths="uneven", layers=3), Layout(widths="halves", layers=4)
EMPTY = Layout(widths="empty", layers=4)
LAYOUTS = [
    replace(UNEVEN, tp=2, sequence_parallel=True, dp=2, zero=1, untied=True),
    replace(UNEVEN, tp=4, zero=3, recompute="parts", dropout=0.1),
    replace(HALVES, pp=2, schedule="interleaved", virtual=2, zero=2, dp=2, shape="llama"),
    replace(HALVES, pp=4, schedule="zb-h1", recompute="full", documents=True),
    replace(HALVES, cp=2, tp=2, comm="a2a", sequence_parallel=True, dropout=0.1),
    replace(HALVES, pp=2, schedule="zb-v", tp=2, zero=3, keep=True, dropout=0.1, method="both"),
    replace(EMPTY, pp=4, zero=3, schedule="gpipe"),
    replace(EMPTY, pp=2, tp=2, sequence_parallel=True, recompute="selective", shape="llama"),
    replace(EMPTY, dp=2, zero=3, layers=3, documents=True, micro_batch=2, store="cpu"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_process(layout):
    assert not layout.broken_rules()
    layout = layout.brief
    check_as_threads(layout)


def test_the_layouts_have_each_value_of_each_setting():
    expected = {
        "widths": set(WIDTHS),
        "tp": {1, 2, 4},
        "pp": {1, 2, 4},
        "dp": {1, 2},
        "cp": {1, 2},
        "schedule": {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"},
        "zero": {0, 1, 2, 3},
        "sequence_parallel": {False, True},
        "recompute": {"none", "full", "selective", "parts"},
        "documents": {False, True},
        "dropout": {0.0, 0.1},
    }
    for name, values in expected.items():
        assert {getattr(layout, name) for layout in LAYOUTS} == values, name


@pytest.mark.parametrize("widths", WIDTHS)
def test_each_does_something(widths):
    heads = {"num_attention_heads": 8, "kv_channels": 4}
    alike = Layout(layers=3).serial.config()
    alike = alike.model_copy(update={"model": alike.model.model_copy(update=heads)})
    assert serial(Layout(layers=3, widths=widths).serial).losses[0] != run_alone(alike).losses[0]


def test_every_parameter_is_there_and_learns():
    record = serial(HALVES.serial)
    shapes = {name: tuple(w.shape) for name, w in record.weights[0].items() if name.endswith("weight")}
    attention, mlp = ("layers.{}.attention.qkv.weight", "layers.{}.mlp.down.weight")
    assert [shapes.get(attention.format(n)) for n in range(4)] == [
        (4, 4, 4, 32),
        None,
        (8, 3, 4, 32),
        (4, 4, 4, 32),
    ]
    assert [shapes.get(mlp.format(n)) for n in range(4)] == [(32, 32), (32, 40), None, (32, 32)]
    for name, weight in record.weights[0].items():
        assert record.gradients[0][name].abs().max() > 0, name
        assert not weight.equal(record.weights[-1][name]), name


def test_a_difference_is_seen():
    layout = replace(HALVES, tp=2, zero=1)
    records = run_in_threads(layout.config(), layout.grid)
    records[1].gradients[2]["layers.1.mlp.up.weight"].view(-1)[3] += 1e-3
    bad = [d for d in compare(records, serial(layout.serial)) if d.share > 1]
    assert [d.kind for d in bad] == ["gradients"]


@pytest.mark.parametrize("partition", ["cost", "type:SelfAttention|TransformerLayer", "1,3"])
def test_ways_to_deal_layers_to_stages(partition):
    layout = replace(HALVES, pp=2)
    config = layout.config()
    parallel = config.parallel.model_copy(update={"pipeline_partition": partition})
    check_as_threads(layout, config.model_copy(update={"parallel": parallel}))


@pytest.mark.slow
def test_compiled_layers_learn_the_same():
    layout = replace(HALVES, compiled="aot_eager", documents=True)
    check([run_alone(layout.config())], layout)


@pytest.mark.slow
@pytest.mark.gloo
def test_processes_equal_one_process(pool):
    layout = replace(HALVES, tp=2, zero=1, sequence_parallel=True)
    check_as_processes(pool, layout)
