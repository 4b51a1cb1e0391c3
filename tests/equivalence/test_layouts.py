"""Law 1: any layout trains the same model as one process. `megazero.verify` does the work.

The default suite runs the fewest of the layouts that the rules allow in which every pair of settings meets,
and some more so that every store and method meets all of them; `--slow` runs several times as many,
`--all-layouts` every one (hours).
"""

from __future__ import annotations

import pytest

from megazero.config.tree.recompute import RecomputeConfig
from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_in_threads
from tests.equivalence.one_process import Sweep, check_as_processes, check_as_threads, serial
from tests.layouts.layout import DECODERS, Layout
from tests.layouts.selection import candidates, covering

SWEEP = Sweep(candidates, 42, 200)


def run(layout: Layout) -> list[Record]:
    return run_in_threads(layout.config(), layout.grid)


def pytest_generate_tests(metafunc):
    SWEEP.parametrize(metafunc)


def test_layout_equals_one_process(selected):
    check_as_threads(selected)


def test_the_selections_hold_every_pair_of_settings():
    names = ("tp", "pp", "dp", "schedule", "zero", "recompute")
    others = ("zero", "shape", "untied", "sequence_parallel", "micro_batch")
    SWEEP.holds_every_pair(names, others, least=200)


def test_covering_takes_the_few_that_hold_all_pairs():
    grid = [Layout(tp=tp, dp=dp, zero=zero) for tp in (1, 2) for dp in (1, 2) for zero in (0, 1)]
    chosen = list(covering(grid, 0))
    assert len(chosen) < len(grid)
    for a, b in (("tp", "dp"), ("tp", "zero"), ("dp", "zero")):
        assert len({(getattr(x, a), getattr(x, b)) for x in chosen}) == 4


@pytest.mark.parametrize("shape", DECODERS)
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tp": 2, "dp": 2, "zero": 1},
        {"tp": 2, "sequence_parallel": True, "recompute": "full"},
        {"tp": 4, "dp": 2, "sequence_parallel": True, "recompute": "selective"},
        {"pp": 2, "dp": 2, "zero": 3, "recompute": "full"},
        {"pp": 4, "schedule": "zb-h1", "recompute": "selective", "layers": 4},
        {"pp": 2, "tp": 2, "schedule": "interleaved", "virtual": 2, "layers": 4, "recompute": "full"},
        {"pp": 2, "schedule": "zb-v", "layers": 4, "recompute": "full"},
        {"dp": 4, "zero": 2, "recompute": "selective"},
    ],
    ids=lambda settings: Layout(**settings).name,
)
def test_dropout_is_the_same_on_every_layout(layout, shape):
    layout = Layout(dropout=0.2, micro_batch=2, shape=shape, **layout)
    check_as_threads(layout)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("hpz", [2, 4])
def test_a_second_partition_within_a_node_changes_nothing(hpz, schedule):
    layout = Layout(dp=4, zero=3, hpz=hpz, schedule=schedule)
    check_as_threads(layout)


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_gradient_accumulation(micro_batch):
    for layout in (Layout(zero=2), Layout(pp=2, zero=1)):
        layout = Layout(**{**vars(layout), "micro_batch": micro_batch})
        check_as_threads(layout)


@pytest.mark.parametrize(
    "recompute",
    [
        {"partition_activations": True},
        {"partition_activations": True, "offload": True},
        {"method": "every", "num_layers": 2},
        {"method": "uniform", "num_layers": 2},
        {"method": "block", "num_layers": 1, "offload": True},
    ],
    ids=lambda settings: "-".join(settings),
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_ways_to_recompute(recompute, schedule):
    layout = Layout(tp=2, pp=2, zero=1, schedule=schedule, layers=4)
    config = layout.config()
    kept = RecomputeConfig(granularity="full", **recompute)
    check_as_threads(layout, config.model_copy(update={"recompute": kept}))


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "dp": 2, "zero": 1, "untied": True},
        {"tp": 2, "sequence_parallel": True, "shape": DECODERS[1], "recompute": "full"},
        {"tp": 2, "pp": 2, "schedule": "zb-v", "layers": 4, "sequence_parallel": True},
        {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb-h1", "untied": True},
    ],
    ids=lambda settings: Layout(**settings).name,
)
def test_logits_that_are_never_whole(layout):
    layout = Layout(**layout)
    config = layout.config()
    kept = config.recompute.model_copy(update={"logits": True})
    check_as_threads(layout, config.model_copy(update={"recompute": kept}))


@pytest.mark.parametrize("partition", ["parameters", "cost", "measured", "1,2", "type:Transformer"])
def test_ways_to_deal_layers_to_stages(partition):
    layout = Layout(pp=2, layers=3)
    config = layout.config()
    parallel = config.parallel.model_copy(update={"pipeline_partition": partition})
    check_as_threads(layout, config.model_copy(update={"parallel": parallel}))


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "group": 3},  # 8 micro-batches: 3, 3 and 2
        {"pp": 2, "tp": 2, "group": 4, "zero": 1, "sequence_parallel": True, "recompute": "full"},
        {"pp": 2, "dp": 2, "group": 4, "zero": 3, "keep": True, "dropout": 0.1},
        {"pp": 2, "dp": 2, "group": 2, "zero": 2, "shape": "llama", "untied": True},
        pytest.param({"pp": 4, "group": 5, "layers": 8, "samples": 10, "zero": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 4, "tp": 2, "group": 8, "layers": 12, "virtual": 3}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: Layout(**settings).name,
)
def test_micro_batches_in_groups(layout):
    layout = Layout(**{"schedule": "interleaved", "virtual": 2, "layers": 4, **layout})
    check_as_threads(layout)


def test_dropout_does_something():
    assert serial(Layout(dropout=0.2)).losses[0] != serial(Layout()).losses[0]


def test_a_model_that_learns():
    # The law would hold for a training that moves nothing; this one moves.
    record = serial(Layout())
    first, last = record.weights[0], record.weights[-1]
    assert all(not first[name].equal(last[name]) for name in first)
    assert all(norm > 0.5 for norm in record.grad_norms), "clipping is not active"


@pytest.mark.parametrize("zero", range(4))
def test_overlap_and_bucket_sizes_change_nothing(zero):
    layouts = [
        Layout(tp=2, dp=2, zero=zero, overlap=o, bucket_size=b) for o, b in [(0, 3000), (1, 1), (1, 10**9)]
    ]
    for layout in layouts:
        check_as_threads(layout)


@pytest.mark.parametrize("broken", ["losses", "grad_norms", "gradients", "weights"])
def test_a_difference_is_seen(broken):
    layout = Layout(tp=2)
    records = run(layout)
    values = getattr(records[1], broken)
    if broken == "losses":
        values[3]["lm loss"] *= 1.001
    elif broken == "grad_norms":
        values[3] *= 1.001
    else:
        values[3]["layers.1.mlp.up.weight"].view(-1)[5] += 1e-3
    bad = [d for d in compare(records, serial(layout.serial)) if d.share > 1]
    kinds = {"losses": "lm loss", "grad_norms": "gradient norm"}
    assert [d.kind for d in bad] == [kinds.get(broken, broken)]
    assert "step 3" in bad[0].where


def test_a_tied_copy_that_differs_in_one_bit_is_seen():
    layout = Layout(pp=2)
    records = run(layout)
    copy = records[1].weights[2]["copy of embedding.word.weight"]
    copy[0, 0] = copy[0, 0].nextafter(copy[0, 0] + 1)
    assert [d.kind for d in compare(records, serial(layout.serial)) if d.share > 1] == ["tied copies"]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, backend="gloo"),
        pytest.param(Layout(dp=2, zero=2), marks=pytest.mark.fast),
        Layout(dp=2, zero=3, backend="gloo"),
        Layout(tp=2, sequence_parallel=True, shape="llama", untied=True, backend="gloo"),
        Layout(tp=2, dp=2, sequence_parallel=True, recompute="full", dropout=0.1, zero=2),
        Layout(tp=4, shape="llama", recompute="selective"),
        Layout(pp=2, zero=1),
        Layout(pp=2, dp=2, zero=2, schedule="zb-h1", backend="gloo"),
        Layout(pp=2, dp=2, zero=3, schedule="interleaved", virtual=2, layers=4),
        Layout(pp=2, tp=2, sequence_parallel=True, schedule="zb-v", layers=4, shape="llama"),
        Layout(pp=4, schedule="zb-h1", layers=4, dropout=0.1),
        Layout(pp=4, schedule="gpipe", layers=4, untied=True),
        Layout(dp=4, zero=3, hpz=2),
        Layout(tp=2, pp=2, dp=2, zero=3, sequence_parallel=True, recompute="full"),
    ],
    ids=lambda layout: layout.name,
)
def test_processes_equal_one_process(pool, layout):
    check_as_processes(pool, layout)
