"""Law 1 while sequences grow: each step has its length on every layout, and messages have its shape."""

from __future__ import annotations

from functools import cache

import pytest

from megazero.config.tree.config import Config
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_alone, run_in_threads, run_in_world
from tests.layouts.layout import SEQUENCE, Layout

# 8, 8, 12, 16, 16 tokens in the five steps; by tokens, with 8 samples in a step: 4, 4, 8, 8, 16. In rows: 4
# of 4 tokens of each sample, twice; then 2 of 6, twice, which leave 4 tokens out; and 1 of 16.
SCHEDULES = {
    "steps": CurriculumConfig(
        seqlen_schedule="fixed_linear",
        seqlen_min_difficulty=8,
        seqlen_total_curriculum_step=4,
        seqlen_difficulty_step=4,
    ),
    "tokens": CurriculumConfig(
        seqlen_schedule="fixed_discrete",
        seqlen_unit="tokens",
        seqlen_difficulty=(4, 8, 16),
        seqlen_max_step=(64, 160),
    ),
    "rows": CurriculumConfig(
        seqlen_schedule="fixed_discrete",
        seqlen_kind="reshape",
        seqlen_difficulty=(4, 6, 16),
        seqlen_max_step=(2, 4),
    ),
}


def growing(layout: Layout, schedule: str) -> Config:
    return layout.config().model_copy(update={"curriculum": SCHEDULES[schedule]})


@cache
def serial(layout: Layout, schedule: str) -> Record:
    return run_alone(growing(layout, schedule))


def check(records: list[Record], layout: Layout, schedule: str) -> None:
    bad = [str(d) for d in compare(records, serial(layout.serial, schedule)) if d.share > 1]
    assert not bad, "\n".join(bad)


LAYOUTS = [
    pytest.param(Layout(tp=2, sequence_parallel=True), "steps", marks=pytest.mark.fast),
    (Layout(tp=4, sequence_parallel=True, shape="llama", recompute="full"), "tokens"),
    (Layout(tp=2, dp=2, zero=2, recompute="selective"), "steps"),
    (Layout(pp=2, schedule="gpipe", zero=1, dp=2, micro_batch=2), "tokens"),
    (Layout(pp=2, tp=2, sequence_parallel=True, micro_batch=2), "steps"),
    (Layout(pp=4, layers=4, shape="llama"), "tokens"),
    (Layout(pp=2, schedule="interleaved", virtual=2, layers=4, recompute="full"), "steps"),
    (Layout(pp=2, tp=2, schedule="zb-h1", untied=True), "tokens"),
    (Layout(pp=2, schedule="zb-v", layers=4, dp=2), "steps"),
    (Layout(dp=2, zero=3, shape="llama"), "tokens"),
    (Layout(dp=4, zero=3, keep=True), "steps"),
    (Layout(dp=2, ep=2, experts="top2", zero=2), "steps"),
    (Layout(tp=2, dp=2, ep=2, experts="random", sequence_parallel=True), "tokens"),
    (Layout(dp=2, ep=2, experts="first-come", dispatcher="allgather", micro_batch=2), "steps"),
    (Layout(pp=2, dp=2, shape="bert", dropout=0.1), "steps"),
    (Layout(tp=2, shape="bert-original", optimizer="lamb", zero=1), "steps"),
    (Layout(tp=2, dropout=0.1, recompute="full", sequence_parallel=True), "tokens"),
    (Layout(shape="bert", packed=True, micro_batch=4), "steps"),
    (Layout(pp=2, shape="bert-original", packed=True, micro_batch=4), "tokens"),
    (Layout(micro_batch=2, dropout=0.1), "rows"),
    (Layout(tp=2, dp=2, zero=3, micro_batch=2, dropout=0.1, recompute="full"), "rows"),
    (Layout(pp=2, tp=2, sequence_parallel=True, shape="llama", schedule="zb-h1"), "rows"),
    (Layout(pp=2, schedule="interleaved", virtual=2, layers=4, micro_batch=2, zero=1), "rows"),
    (Layout(dp=2, ep=2, experts="top2", zero=2), "rows"),
]


@pytest.mark.parametrize(
    ("layout", "schedule"), LAYOUTS, ids=lambda x: x.name if isinstance(x, Layout) else x
)
def test_layout_equals_one_process(layout, schedule):
    check(run_in_threads(growing(layout, schedule), layout.grid), layout, schedule)


@pytest.mark.gloo
def test_processes_equal_one_process(pool):
    layout = Layout(tp=2, pp=2, sequence_parallel=True, micro_batch=2)
    records = pool.run(run_in_world, layout.world_size, growing(layout, "steps"), layout.grid)
    check(records, layout, "steps")


def test_a_curriculum_that_does_not_grow_is_none():
    still = CurriculumConfig(
        seqlen_schedule="fixed_linear", seqlen_min_difficulty=SEQUENCE, seqlen_total_curriculum_step=3
    )
    config = Layout().config()
    found, plain = (run_alone(c) for c in (config.model_copy(update={"curriculum": still}), config))
    assert found.losses == plain.losses
    for name, weight in plain.weights[-1].items():
        assert found.weights[-1][name].equal(weight)


def test_a_curriculum_changes_the_training():
    assert serial(Layout().serial, "steps").losses != run_alone(Layout().serial.config()).losses
