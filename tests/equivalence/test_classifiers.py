"""Law 1 for classifiers: any layout fine-tunes like one process, whatever the samples' lengths and labels."""

from __future__ import annotations

from functools import cache

import pytest

from megazero.config.tree.config import Config
from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_alone, run_in_threads
from tests.layouts.layout import Layout

STEPS = 2
KINDS = [("gpt", 3), ("gpt", 1), ("bert", 3), ("bert", 1)]
LAYOUTS = [
    Layout(tp=2, dp=2, zero=3, sequence_parallel=True, recompute="full"),
    Layout(pp=2, dp=2, zero=1, schedule="zb-h1", dropout=0.2),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True, dropout=0.2),
    Layout(tp=4, sequence_parallel=True, zero=1),
    Layout(dp=2, zero=1, micro_batch=2),
    Layout(dp=2, zero=3),
    Layout(dp=4, zero=2, dropout=0.2),
    Layout(pp=2),
    Layout(pp=2, schedule="zb-v", layers=4),
    Layout(pp=2, schedule="interleaved", virtual=2, layers=4),
    Layout(pp=4, layers=4, schedule="gpipe"),
    Layout(tp=2, pp=2, zero=1, dp=2),
    Layout(pp=2, dp=2, zero=2, recompute="selective"),
    Layout(pp=2, dp=2, zero=3, schedule="zb-h1"),
    Layout(micro_batch=4, recompute="full", dropout=0.2),
]


def config_of(layout: Layout, family: str, classes: int) -> Config:
    config = layout.config(steps=STEPS + 3)
    changes = {"family": family, "num_classes": classes}
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


@cache
def serial(layout: Layout, family: str, classes: int) -> Record:
    return run_alone(config_of(layout, family, classes), STEPS)


def pytest_generate_tests(metafunc):
    """Each layout with one of the kinds in turn, and the first with all; or all with all."""
    everything = metafunc.config.getoption("--all-layouts")
    cases = [
        pytest.param(
            *(layout, family, classes),
            id=f"{layout.name}-{family}-{classes}",
            marks=[pytest.mark.fast] * (number == 0),
        )
        for number, layout in enumerate(LAYOUTS)
        for kind, (family, classes) in enumerate(KINDS)
        if everything or number < 1 or kind == number % len(KINDS)
    ]
    metafunc.parametrize(("layout", "family", "classes"), cases)


def test_a_layout_trains_a_classifier_like_one_process(layout, family, classes):
    records = run_in_threads(config_of(layout, family, classes), layout.grid, STEPS)
    bad = [str(d) for d in compare(records, serial(layout.serial, family, classes)) if d.share > 1]
    assert not bad, "\n".join(bad)
