"""Law 1 with each optimizer: the same numbers however a layout cuts, shards or copies parameters.

AdamW's are the other files of this folder, LAMB's `test_lamb.py`. Lion goes without biases and Adagrad with a
large epsilon: the gradient of the keys' bias is nothing but rounding, which their updates would magnify.
"""

from __future__ import annotations

from functools import cache

import pytest

from megazero.config.tree.config import Config
from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_alone, run_in_threads
from proofs import reshard_sweep as reshard
from tests.layouts.layout import Layout

LAYOUTS = {
    "lion": [
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2, "schedule": "gpipe"},
        {"dp": 2, "zero": 1, "bucket_size": 1},
        {"dp": 2, "zero": 3},
    ],
    "ademamix": [
        {"tp": 2, "dp": 2, "zero": 3, "sequence_parallel": True},
        {"dp": 2, "zero": 2},
        {"pp": 2, "dp": 2, "zero": 1},
    ],
    "adagrad": [{"tp": 2, "dp": 2, "zero": 1}, {"pp": 2, "dp": 2, "zero": 3, "untied": True}],
    "adadelta": [{"tp": 2, "dp": 2, "zero": 3}, {"pp": 2, "dp": 2, "zero": 1}],
    "adamax": [{"tp": 2, "dp": 2, "zero": 1}, {"pp": 2, "dp": 2, "zero": 3}],
    "nadam": [{"tp": 2, "dp": 2, "zero": 3}, {"pp": 2, "dp": 2, "zero": 1}],
    "radam": [{"tp": 2, "dp": 2, "zero": 1}, {"pp": 2, "dp": 2, "zero": 3}],
    "rmsprop": [{"tp": 2, "dp": 2, "zero": 3}, {"pp": 2, "dp": 2, "zero": 1}],
    "muon": [
        {"tp": 2, "shape": "llama"},
        {"tp": 2, "dp": 2, "zero": 2, "sequence_parallel": True, "bucket_size": 1},
        {"pp": 2, "dp": 2, "zero": 3, "layers": 4, "schedule": "zb-v", "shape": "llama"},
        {"dp": 2, "zero": 1, "shape": "bert"},
        {"tp": 2, "dp": 2, "ep": 2, "zero": 1, "experts": "shared"},
        {"dp": 4, "ep": 2, "zero": 3, "experts": "top2", "shape": "llama"},
    ],
}
WITHOUT_BIASES = {"lion": {"shape": "llama"}}
SETTINGS = {
    "ademamix": {"ademamix_beta3": 0.95, "ademamix_beta3_warmup": 2, "ademamix_alpha_warmup": 3},
    "muon-scalars": {"muon_scalar_optimizer": "lion", "muon_scalar_lr": 1e-3, "muon_split_qkv": False},
    "muon-as-jordans": {
        "muon_nesterov": True,
        "muon_coefficient_type": "simple",
        "muon_scale_mode": "shape_scaling",
    },
}
MEMBERS = [
    Layout(optimizer=name, **{**WITHOUT_BIASES.get(name, {}), **layout})
    for name, layouts in LAYOUTS.items()
    for layout in layouts
]


def configure(layout: Layout, settings: str | None = None) -> Config:
    config = layout.config()
    return config.model_copy(
        update={"optimizer": config.optimizer.model_copy(update=SETTINGS.get(settings, {}))}
    )


@cache
def serial(layout: Layout, settings: str | None) -> Record:
    return run_alone(configure(layout, settings))


def check(layout: Layout, settings: str | None = None) -> None:
    records = run_in_threads(configure(layout, settings), layout.grid)
    bad = [str(d) for d in compare(records, serial(layout.serial, settings)) if d.share > 1]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("layout", MEMBERS, ids=lambda layout: layout.name)
def test_layout_equals_one_process(layout):
    assert not layout.broken_rules()
    check(layout)


@pytest.mark.fast
@pytest.mark.parametrize("settings", SETTINGS)
def test_so_it_does_with_settings_of_its_own(settings):
    name = settings.partition("-")[0]
    check(Layout(optimizer=name, tp=2, dp=2, zero=1, shape="llama"), settings)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            Layout(optimizer="muon", tp=2, dp=2, zero=1, shape="llama"),
            Layout(optimizer="muon", pp=2, dp=2, zero=3, bucket_size=1, shape="llama"),
        ),
        (
            Layout(optimizer="lion", dp=2, zero=3, shape="llama"),
            Layout(optimizer="lion", tp=2, shape="llama"),
        ),
        (Layout(optimizer="ademamix", tp=2, dp=2, zero=3), Layout(optimizer="ademamix", pp=2, dp=2, zero=1)),
        (Layout(optimizer="radam", tp=2, dp=2, zero=2), Layout(optimizer="radam", pp=2)),
    ],
    ids=lambda layout: layout.name,
)
def test_a_checkpoint_goes_there_and_back_bit_for_bit(first, second, tmp_path):
    assert reshard.check((reshard.Case(first), reshard.Case(second)), tmp_path).wrong == ()


def test_each_optimizer_meets_each_kind_of_layout():
    for name in LAYOUTS:
        mine = [layout for layout in MEMBERS if layout.optimizer == name]
        assert {layout.tp for layout in mine} >= {1, 2}
        assert {layout.pp for layout in mine} == {1, 2}
        assert {layout.zero for layout in mine} >= {1, 3}


def test_each_optimizer_trains_otherwise():
    losses = {name: serial(Layout(optimizer=name, shape="llama"), None).losses[-1] for name in LAYOUTS}
    assert len({round(each["lm loss"], 4) for each in losses.values()}) == len(LAYOUTS)
