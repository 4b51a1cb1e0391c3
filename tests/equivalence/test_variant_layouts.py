"""Law 1 for variants of the layers: norms, gates, bounds and factors are the same on every layout."""

from __future__ import annotations

import pytest

from megazero.verify.run import run_alone
from tests.equivalence.one_process import Sweep, check_as_processes, check_as_threads, serial
from tests.layouts.layout import DECODERS, ENCODERS, Layout
from tests.layouts.selection import variant_layouts
from tests.layouts.variants import VARIANTS

SWEEP = Sweep(variant_layouts, 14, 220, every=3, few_ranks=4)


def pytest_generate_tests(metafunc):
    SWEEP.parametrize(metafunc)


def test_layout_equals_one_process(selected):
    check_as_threads(selected)


def test_the_selections_hold_every_pair_of_settings():
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
    SWEEP.few_have(expected)
    SWEEP.holds_every_pair(expected, least=200, slow=True)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name])
def test_each_does_something(variant):
    layout = Layout(variant=variant).serial
    assert serial(layout).losses[1] != run_alone(Layout().serial.config()).losses[1]


@pytest.mark.slow
def test_processes_equal_one_process(pool):
    layout = Layout(tp=2, sequence_parallel=True, variant="olmo")
    check_as_processes(pool, layout)
