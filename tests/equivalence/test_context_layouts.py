"""Law 1 where several ranks share each sequence: what attention sends changes nothing of what is learnt."""

from __future__ import annotations

import pytest

from tests.equivalence.one_process import Sweep, check_as_processes, check_as_threads
from tests.layouts.layout import ATTENDS, DECODERS, ENCODERS, Layout
from tests.layouts.selection import context_layouts

SWEEP = Sweep(context_layouts, 77, 220, every=2, few_ranks=4)


def pytest_generate_tests(metafunc):
    SWEEP.parametrize(metafunc)


@pytest.mark.seconds(5)
def test_layout_equals_one_process(selected):
    check_as_threads(selected)


def test_the_selections_hold_every_pair_of_settings():
    expected = {
        "cp": {2, 3, 4},
        "comm": {"p2p", "a2a", "all_gather", "a2a+p2p", "mixed"},
        "attends": set(ATTENDS),
        "experts": {"", "top2", "first-come", "shared"},
        "tp": {1, 2, 4},
        "pp": {1, 2, 4},
        "dp": {1, 2},
        "schedule": {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"},
        "zero": {0, 1, 2, 3},
        "sequence_parallel": {False, True},
        "recompute": {"none", "full", "selective"},
        "documents": {False, True},
        "packed": {False, True},
        "dropout": {0.0, 0.1},
        "shape": {*DECODERS, *ENCODERS},
    }
    SWEEP.few_have(expected)
    SWEEP.holds_every_pair(expected, least=200)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(cp=2, documents=True, shape="llama", dropout=0.1, micro_batch=2),
        Layout(cp=2, comm="a2a", zero=3, micro_batch=2),
        Layout(cp=4, comm="a2a+p2p", zero=1, micro_batch=2, shape="llama"),
        Layout(cp=2, tp=2, sequence_parallel=True, comm="all_gather", shape="bert", micro_batch=2),
        Layout(cp=2, pp=2, schedule="zb-h1", experts="top2", micro_batch=2),
    ],
    ids=lambda layout: layout.name,
)
def test_processes_equal_one_process(pool, layout):
    check_as_processes(pool, layout)
