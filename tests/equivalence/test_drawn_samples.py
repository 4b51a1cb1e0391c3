"""Laws 1 and 3 of curricula over samples: the same samples, and so the same training, on every layout."""

from __future__ import annotations

from functools import cache

import pytest

from megazero.config.tree.config import Config
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.config.tree.data_sampling import CurriculumMetric, DataSamplingConfig
from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_alone, run_in_threads
from megazero.verify.sampling import shrunk_metric
from tests.layouts.layout import Layout

BOTH = tuple(
    shrunk_metric(CurriculumMetric(name=name, schedule_type="fixed_linear")) for name in ("rarity", "seqlen")
)
GROWS = CurriculumConfig(seqlen_schedule="fixed_discrete", seqlen_difficulty=(8, 16), seqlen_max_step=(3,))


def drawn(layout: Layout) -> Config:
    sections = {"data_sampling": DataSamplingConfig(curriculum_metrics=BOTH), "curriculum": GROWS}
    return layout.config().model_copy(update=sections)


@cache
def serial(layout: Layout) -> Record:
    return run_alone(drawn(layout))


LAYOUTS = [
    Layout(dp=2, micro_batch=2, zero=2),
    Layout(dp=4, zero=3),
    Layout(tp=2, dp=2, sequence_parallel=True, dropout=0.1),
    Layout(pp=2, dp=2, zero=1),
    Layout(pp=2, tp=2, micro_batch=2, recompute="full"),
    Layout(dp=2, micro_batch=2, shape="bert"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_process(layout):
    records = run_in_threads(drawn(layout), layout.grid)
    bad = [str(d) for d in compare(records, serial(layout.serial)) if d.share > 1]
    assert not bad, "\n".join(bad)


def test_which_samples_are_drawn_changes_the_training():
    other = DataSamplingConfig(curriculum_metrics=BOTH[:1])
    config = drawn(Layout().serial)
    changed = run_alone(config.model_copy(update={"data_sampling": other}))
    assert changed.losses != serial(Layout().serial).losses
