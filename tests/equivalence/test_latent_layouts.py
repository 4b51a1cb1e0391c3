"""Law 1 with latent attention and the prediction of further tokens: any layout trains as one process does."""

from __future__ import annotations

from functools import cache

import pytest

from megazero.verify.run import run_in_threads
from tests.equivalence.one_process import check, in_order, pairs_met, parametrize
from tests.layouts.layout import LATENT, Layout
from tests.layouts.selection import allowed, covering, latent_layouts, with_methods, with_stores

FEW, MANY = 10, 220

everything = cache(latent_layouts)


@cache
def chosen() -> list[Layout]:
    return covering(everything(), MANY, few_ranks=4, allowed=allowed)


@cache
def selection(count: int) -> list[Layout]:
    """By default some small ones, in which each setting has each of its values; else all that are chosen."""
    if count == FEW:
        small = (layout for layout in everything() if layout.world_size <= 2)
        return in_order(covering(list(small)[:60], 0, allowed=allowed)[:FEW])
    return in_order(with_stores(with_methods(chosen()[:count], every=3)))


def pytest_generate_tests(metafunc):
    parametrize(metafunc, everything, selection, (FEW, MANY), pytest.mark.fast)


def test_layout_equals_one_process(selected):
    check(run_in_threads(selected.config(), selected.grid), selected)


def test_the_selection_holds_every_pair_of_settings():
    many = selection(MANY)
    assert len(many) == len(set(many)) == MANY >= 200
    names = ("tp", "pp", "dp", "cp", "schedule", "zero", "recompute", "experts", "shape")
    others = ("zero", "untied", "sequence_parallel", "micro_batch", "documents", "dropout", "attends", "ep")
    assert pairs_met(many, names, others) == pairs_met(everything(), names, others, allowed)
    assert {layout.shape for layout in selection(FEW)} == set(LATENT)
