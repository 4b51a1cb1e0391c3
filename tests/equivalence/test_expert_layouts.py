"""Law 1 with experts: what a token gets depends neither on where its experts are nor on who else is there."""

from __future__ import annotations

import pytest
from torch import Tensor

from megazero.verify.compare import compare
from megazero.verify.run import run_in_threads
from tests.equivalence.one_process import Sweep, check_as_processes, check_as_threads, serial
from tests.layouts.layout import DECODERS, DRAWN_EXPERTS, ENCODERS, EXPERTS, Layout
from tests.layouts.selection import expert_layouts

SWEEP = Sweep(expert_layouts, 88, 160, every=2, few_ranks=2)


def pytest_generate_tests(metafunc):
    SWEEP.parametrize(metafunc)


@pytest.mark.seconds(5)
def test_layout_equals_one_process(selected):
    check_as_threads(selected)


def test_the_selections_hold_every_pair_of_settings():
    expected = {
        "tp": {1, 2, 4},
        "pp": {1, 2, 4},
        "dp": {1, 2, 4},
        "ep": {1, 2, 4},
        "etp": {0, 1, 2},
        "schedule": {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"},
        "zero": {0, 1, 2, 3},
        "sequence_parallel": {False, True},
        "recompute": {"none", "full", "selective"},
        "micro_batch": {1, 2},
        "shape": {*DECODERS, *ENCODERS},
        "experts": set(DRAWN_EXPERTS),
        "dispatcher": {"alltoall", "allgather"},
    }
    SWEEP.few_have(expected)
    SWEEP.holds_every_pair(expected, least=150)


@pytest.mark.parametrize("kind", [kind for kind in EXPERTS if kind])
def test_each_kind_trains_its_routers(kind):
    """A router that nothing depends on, or whose gradient got lost, would stay where it was."""
    record = serial(Layout(experts=kind, layers=4 if kind == "pyramid" else 2).serial)
    routers = [name for name in record.weights[0] if name.endswith("router.weight")]
    assert routers
    for name in routers:
        assert not record.weights[0][name].equal(record.weights[-1][name])
        assert record.gradients[0][name].abs().max() > 0
    plain = serial(Layout(layers=4 if kind == "pyramid" else 2).serial)
    assert record.losses[-1]["lm loss"] != pytest.approx(plain.losses[-1]["lm loss"], rel=1e-4)
    assert 0 < record.losses[0]["router_entropy"] < 2.1


_FORCED = (
    {"dp": 2, "ep": 2, "zero": 1, "micro_batch": 2},
    {"tp": 2, "dp": 2, "ep": 4, "etp": 1, "zero": 2, "sequence_parallel": True, "recompute": "full"},
    {"pp": 2, "dp": 2, "ep": 2, "zero": 3, "schedule": "zb-h1", "shape": "llama", "dropout": 0.1},
    {"pp": 2, "tp": 2, "schedule": "interleaved", "virtual": 2, "layers": 4, "dispatcher": "allgather"},
    {"cp": 2, "dp": 2, "ep": 2, "zero": 2, "shape": "bert", "recompute": "selective"},
    {"pp": 2, "cp": 2, "schedule": "zb-v", "layers": 4, "zero": 1, "comm": "a2a"},
)


@pytest.mark.parametrize("layout", _FORCED, ids=lambda settings: Layout(**settings).name)
def test_random_logits_are_the_same_on_every_layout(layout):
    layout = Layout(experts="forced", **layout)
    check_as_threads(layout)


@pytest.mark.parametrize("name", ["layers.1.mlp.router.weight", "layers.0.mlp.experts.down.weight"])
def test_a_difference_is_seen(name):
    layout = Layout(experts="top2", dp=2, ep=2, zero=2)
    records = run_in_threads(layout.config(), layout.grid)
    wrong: Tensor = records[1].gradients[2][name]
    wrong.view(-1)[3] += 1e-4
    bad = [d for d in compare(records, serial(layout.serial)) if d.share > 1]
    assert [(d.kind, d.where) for d in bad] == [("gradients", f"{name}, step 2")]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, ep=2, zero=2, experts="top2", backend="gloo"),
        Layout(dp=2, ep=2, zero=3, experts="best", shape="llama", dispatcher="allgather", micro_batch=2),
        Layout(tp=2, dp=2, ep=4, etp=1, zero=1, experts="biased", sequence_parallel=True, recompute="full"),
        Layout(pp=2, dp=2, ep=2, schedule="zb-h1", experts="shared", backend="gloo"),
        Layout(tp=2, dp=2, ep=2, experts="random", micro_batch=2),
    ],
    ids=lambda layout: layout.name,
)
def test_processes_equal_one_process(pool, layout):
    check_as_processes(pool, layout)
