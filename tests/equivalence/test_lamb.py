"""Law 1 with LAMB: its trust ratios are of whole tensors, however a layout cuts, shards or copies them."""

from __future__ import annotations

from functools import cache

import pytest

from megazero.config.tree.config import Config
from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_alone, run_in_threads, run_in_world
from tests.layouts.layout import Layout

ADAPT_ALL = {"lamb_adapt_all": True, "lamb_bias_correction": "rate"}  # as DeepSpeed has it


def configure(layout: Layout, settings: dict | None = None) -> Config:
    config = layout.config()
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=settings or {})})


@cache
def serial(layout: Layout, adapt_all: bool) -> Record:
    return run_alone(configure(layout, ADAPT_ALL if adapt_all else None))


def check(records: list[Record], layout: Layout, adapt_all: bool = False) -> None:
    bad = [str(d) for d in compare(records, serial(layout.serial, adapt_all)) if d.share > 1]
    assert not bad, "\n".join(bad)


LAYOUTS = [
    Layout(optimizer="lamb", **settings)
    for settings in (
        {"dp": 2},
        {"dp": 2, "zero": 1, "bucket_size": 1},
        {"dp": 4, "zero": 2, "shape": "llama"},
        {"dp": 2, "zero": 3, "untied": True, "micro_batch": 2},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 4, "dp": 2, "zero": 2, "shape": "llama", "sequence_parallel": True},
        {"tp": 4, "untied": True, "recompute": "full"},
        {"pp": 2},
        {"pp": 2, "dp": 2, "zero": 1},
        {"pp": 2, "tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
        {"pp": 4, "dp": 2, "zero": 3, "layers": 4, "schedule": "zb-h1"},
        {"pp": 4, "zero": 2, "layers": 4, "untied": True, "schedule": "gpipe"},
        {"pp": 2, "tp": 2, "layers": 4, "schedule": "interleaved", "virtual": 2, "shape": "llama"},
        {"pp": 2, "dp": 2, "zero": 2, "layers": 4, "schedule": "zb-v"},
    )
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_process(layout):
    check(run_in_threads(configure(layout), layout.grid), layout)


@pytest.mark.parametrize("layout", LAYOUTS[1::4], ids=lambda layout: layout.name)
def test_so_it_does_where_all_tensors_are_adapted(layout):
    check(run_in_threads(configure(layout, ADAPT_ALL), layout.grid), layout, adapt_all=True)


@pytest.mark.parametrize("masters", ["fp32", "bf16"])
def test_narrow_masters_keep_to_the_whole_model(masters):
    """In bf16 the ranks' sums round apart; a trust ratio of a part would be off by far more."""
    zero = {"main_params_dtype": masters, "grad_accumulation_dtype": masters}
    records = []
    for shards in ({}, {"dp": 2, "zero": 2}):
        layout = Layout(optimizer="lamb", dtype="bf16", **shards)
        config = configure(layout)
        config = config.model_copy(update={"zero": config.zero.model_copy(update=zero)})
        records.append(run_in_threads(config, layout.grid) if layout.world_size > 1 else [run_alone(config)])
    (alone,), shards = records
    assert shards[0].losses[-1]["lm loss"] == pytest.approx(alone.losses[-1]["lm loss"], rel=2e-3)
    for name, weight in alone.weights[-1].items():
        found = shards[0].weights[-1][name]
        assert (found - weight).norm() < 0.02 * weight.norm() + 0.02, name


@pytest.mark.gloo
def test_processes_equal_one_process(pool):
    layout = Layout(optimizer="lamb", pp=2, dp=2, zero=2, backend="gloo")
    check(pool.run(run_in_world, layout.world_size, configure(layout), layout.grid), layout)


@pytest.mark.fast
def test_the_settings_matter():
    """The law would hold for a ratio that is always 1, too."""
    layout = Layout(optimizer="lamb")
    plain = run_alone(configure(layout, {"lamb_min_coeff": 1.0, "lamb_max_coeff": 1.0}))
    losses = [plain.losses[-1], serial(layout, False).losses[-1], serial(layout, True).losses[-1]]
    assert len({round(each["lm loss"], 4) for each in losses}) == 3
