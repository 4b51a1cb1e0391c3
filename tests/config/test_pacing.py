"""Pacing schedules, by hand and against DeepSpeed's; their pieces against a walk over every step."""

from __future__ import annotations

import pytest

from megazero.config.pacing import Discrete, Pacing, Root, pieces
from megazero.config.steps import BatchRamp, Progress, SequenceLengths, Steps
from tests.tables import over_table


@over_table(
    ("pacing", "values"),
    [
        (
            Root(64, 1024, 45_000, 8),
            {1: 64, 374: 64, 375: 72, 22_500: 544, 44_999: 1016, 45_000: 1024, 10**9: 1024},
        ),
        (Root(5, 100, 100, 1, 2), {1: 14, 25: 52, 50: 72, 99: 99, 100: 100}),
        (Root(8, 30, 10, 8), {1: 8, 10: 24, 11: 30}),  # the end is no multiple
        (Root(8, 64, 10, 16), {1: 16, 10: 64}),  # rounded down it would begin below the beginning
        (Root(6, 64, 10, 16), {1: 16}),
        (Root(16, 16, 5, 8), {1: 16, 9: 16}),
        (Discrete((8, 32, 64), (3, 10)), {1: 8, 3: 8, 4: 32, 10: 32, 11: 64, 99: 64}),
    ],
)
def test_values_by_hand(pacing: Pacing, values: dict[int, int]) -> None:
    assert {count: pacing.at(count) for count in values} == values


@over_table(
    "pacing",
    [
        Root(64, 1024, 4500, 8),
        Root(5, 100, 100, 1, 2),
        Root(8, 30, 10, 8),
        Root(8, 2048, 7, 8),
        Root(1, 500, 3000, 1, 3.5),
        Root(16, 16, 5, 8),
        Discrete((8,), ()),
        Discrete((8, 32, 64), (3, 10)),
    ],
)
def test_pieces_are_those_of_a_walk(pacing: Pacing) -> None:
    walked = [(0, pacing.at(1))]
    for done in range(1, 8000):
        if pacing.at(done + 1) != walked[-1][1]:
            walked.append((done, pacing.at(done + 1)))
    assert pieces(pacing) == tuple(walked)
    assert walked[-1][1] == pacing.hardest


@over_table(
    ("schedule", "settings", "pacing"),
    [
        ("fixed_linear", {"total_curriculum_step": 9000, "difficulty_step": 8}, Root(64, 1024, 9000, 8)),
        (
            "fixed_root",
            {"total_curriculum_step": 9000, "difficulty_step": 4, "root_degree": 2},
            Root(64, 1024, 9000, 4, 2),
        ),
        (
            "fixed_discrete",
            {"difficulty": [64, 512, 1024], "max_step": [3000, 9000]},
            Discrete((64, 512, 1024), (3000, 9000)),
        ),
    ],
)
def test_ten_thousand_points_are_deepspeed_s(schedule, settings, pacing) -> None:
    scheduler = pytest.importorskip("deepspeed.runtime.data_pipeline.curriculum_scheduler")
    theirs = scheduler.CurriculumScheduler(
        {
            "min_difficulty": 64,
            "max_difficulty": 1024,
            "schedule_type": schedule,
            "schedule_config": settings,
        }
    )
    for count in range(1, 10_001):
        assert pacing.at(count) == theirs.update_difficulty(count), count


def test_lengths_in_tokens_change_with_the_first_step_after_as_many() -> None:
    lengths = SequenceLengths(((0, 8), (100, 16), (200, 32)), "tokens")
    steps, progress, seen = Steps(BatchRamp.constant(4), 2, lengths), Progress(), []
    for _ in range(10):
        step = steps.at(progress)
        seen.append((step.before.tokens, step.sequence_length))
        progress = step.after
    assert seen[:4] == [(0, 8), (32, 8), (64, 8), (96, 8)]
    assert seen[4:8] == [(128, 16), (192, 16), (256, 32), (384, 32)]
    assert [steps.before(n).tokens for n in range(8)] == [tokens for tokens, _ in seen[:8]]
    assert [steps.reaching(n) for n in (1, 128, 129, 192, 256, 257)] == [1, 4, 5, 5, 6, 7]
