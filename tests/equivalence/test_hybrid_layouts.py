"""Law 1 for hybrid models: layers of any pattern learn the same, however they are sliced and dealt."""

from __future__ import annotations

import pytest

from megazero.verify.compare import compare
from megazero.verify.run import run_alone, run_in_threads
from tests.equivalence.one_process import Sweep, check, check_as_processes, check_as_threads, serial
from tests.layouts.layout import DECODERS, Layout
from tests.layouts.selection import hybrid_layouts

SWEEP = Sweep(hybrid_layouts, 42, 200, every=2, few_ranks=2)


def pytest_generate_tests(metafunc):
    SWEEP.parametrize(metafunc)


def test_layout_equals_one_process(selected):
    check_as_threads(selected)


def test_the_selections_hold_every_pair_of_settings():
    expected = {
        "letters": {"M", "M-", "-M*", "MM*-", "ME*"},
        "tp": {1, 2, 4},
        "pp": {1, 2, 4},
        "dp": {1, 2},
        "schedule": {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"},
        "zero": {0, 1, 2, 3},
        "sequence_parallel": {False, True},
        "recompute": {"none", "full", "selective"},
        "documents": {False, True},
        "dropout": {0.0, 0.1},
        "shape": {*DECODERS},
    }
    SWEEP.few_have(expected)
    SWEEP.holds_every_pair(expected, least=200)


MIXER = (
    *("input.weight", "conv.weight", "conv.bias", "dt_bias", "a_log", "skip", "norm.weight"),
    "output.weight",
)


def test_every_parameter_of_a_mixer_learns():
    """One that nothing depends on, or whose gradient got lost, would stay where it was."""
    record = serial(Layout(letters="M-", documents=True).serial)
    names = [f"layers.0.mamba.{name}" for name in MIXER]
    assert set(names) == {name for name in record.weights[0] if "mamba" in name}
    for name in names:
        assert record.gradients[0][name].abs().max() > 0
        assert not record.weights[0][name].equal(record.weights[-1][name])


def test_documents_end_states():
    layout = Layout(letters="M-").serial
    apart = Layout(letters="M-", documents=True).serial
    assert serial(layout).losses[0] != serial(apart).losses[0]


@pytest.mark.parametrize("name", ["layers.0.mamba.a_log", "layers.0.mamba.conv.weight"])
def test_a_difference_is_seen(name):
    layout = Layout(letters="M-", tp=2, zero=1)
    records = run_in_threads(layout.config(), layout.grid)
    records[1].gradients[2][name].view(-1)[3] += 1e-3
    bad = [d for d in compare(records, serial(layout.serial)) if d.share > 1]
    assert [d.kind for d in bad] == ["gradients"]
    assert name in bad[0].where


@pytest.mark.parametrize("partition", ["cost", "measured", "type:Mamba"])
def test_ways_to_deal_layers_to_stages(partition):
    layout = Layout(pp=2, layers=4, letters="MM*-")
    config = layout.config()
    parallel = config.parallel.model_copy(update={"pipeline_partition": partition})
    check_as_threads(layout, config.model_copy(update={"parallel": parallel}))


@pytest.mark.slow
def test_compiled_layers_learn_the_same():
    layout = Layout(letters="M-*", layers=3, compiled="aot_eager", documents=True)
    check([run_alone(layout.config())], layout)


@pytest.mark.slow
@pytest.mark.gloo
def test_processes_equal_one_process(pool):
    layout = Layout(tp=2, zero=1, sequence_parallel=True, letters="M-*", layers=3, documents=True)
    check_as_processes(pool, layout)
