"""Law 1 with latent attention and the prediction of further tokens: any layout trains as one process does."""

from __future__ import annotations

from megazero.verify.run import run_in_threads
from tests.equivalence.one_process import Sweep, check
from tests.layouts.layout import LATENT
from tests.layouts.selection import latent_layouts

SWEEP = Sweep(latent_layouts, 10, 220, every=3)


def pytest_generate_tests(metafunc):
    SWEEP.parametrize(metafunc)


def test_layout_equals_one_process(selected):
    check(run_in_threads(selected.config(), selected.grid), selected)


def test_the_selection_holds_every_pair_of_settings():
    names = ("tp", "pp", "dp", "cp", "schedule", "zero", "recompute", "experts", "shape")
    others = ("zero", "untied", "sequence_parallel", "micro_batch", "documents", "dropout", "attends", "ep")
    SWEEP.few_have({"shape": set(LATENT)})
    SWEEP.holds_every_pair(names, others, least=200, slow=True)
