"""Law 1 for variants of the layers: norms, gates, bounds and factors are the same on every layout."""

from __future__ import annotations

from functools import cache

import pytest

from megazero.verify.run import run_alone, run_in_threads, run_in_world
from tests.equivalence.one_process import check, in_order, pairs_met, parametrize, serial
from tests.layouts.layout import DECODERS, ENCODERS, Layout
from tests.layouts.selection import allowed, covering, variant_layouts, with_methods, with_stores
from tests.layouts.variants import VARIANTS

FEW, MANY = 14, 220


everything = cache(variant_layouts)


@cache
def chosen() -> list[Layout]:
    return covering(everything(), MANY, few_ranks=4, allowed=allowed)


@cache
def selection(count: int) -> list[Layout]:
    return in_order(with_stores(with_methods(chosen()[:count], every=3)))


def pytest_generate_tests(metafunc):
    parametrize(metafunc, everything, selection, (FEW, MANY), pytest.mark.fast)


def test_layout_equals_one_process(selected):
    check(run_in_threads(selected.config(), selected.grid), selected)


def test_the_selections_hold_every_pair_of_settings():
    few, many = selection(FEW), selection(MANY)
    assert len(few) == len(set(few)) == FEW
    assert set(few) < set(many)
    assert len(many) == len(set(many)) == MANY >= 200
    expected = {
        "variant": set(VARIANTS) - {""},
        "cp": {1, 2},
        "comm": {"p2p", "a2a", "all_gather", "a2a+p2p", "mixed"},
        "experts": {"", "top2", "shared"},
        "tp": {1, 2, 4},
        "pp": {1, 2, 4},
        "dp": {1, 2},
        "schedule": {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"},
        "zero": {0, 1, 2, 3},
        "sequence_parallel": {False, True},
        "recompute": {"none", "full", "selective", "parts"},
        "documents": {False, True},
        "dropout": {0.0, 0.1},
        "shape": {*DECODERS, *ENCODERS},
    }
    for name, values in expected.items():
        assert {getattr(layout, name) for layout in few} == values, name
    assert pairs_met(many, expected, expected) == pairs_met(everything(), expected, expected, allowed)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name])
def test_each_does_something(variant):
    layout = Layout(variant=variant).serial
    assert serial(layout).losses[1] != run_alone(Layout().serial.config()).losses[1]


def test_processes_equal_one_process(pool):
    layout = Layout(tp=2, sequence_parallel=True, variant="olmo")
    check(pool.run(run_in_world, layout.world_size, layout.config(), layout.grid), layout)
