from __future__ import annotations

from megazero.config.difficulties import Difficulties
from megazero.config.pacing import Discrete, Root, pieces, reached
from megazero.config.steps import BatchRamp, Progress, SequenceLengths, Steps
from megazero.config.tree.data_sampling import CurriculumMetric, DataSamplingConfig
from tests.tables import over_table

RAMP = CurriculumMetric(
    name="ramp",
    min_difficulty=10,
    max_difficulty=40,
    schedule_type="fixed_linear",
    total_curriculum_step=6,
    difficulty_step=10,
)
LEVELS = CurriculumMetric(name="levels", schedule_type="fixed_discrete", difficulty=(1, 5), max_step=(4,))


def difficulties(unit: str = "iters") -> Difficulties:
    return Difficulties.of(DataSamplingConfig(curriculum_metrics=(RAMP, LEVELS), curriculum_unit=unit))


def test_pieces_begin_where_any_metric_changes():
    found = difficulties()
    assert found.starts == (0, 1, 3, 4, 5)
    assert found.levels == ((10, 1), (20, 1), (30, 1), (30, 5), (40, 5))
    assert found.at(Progress(iteration=3)) == {"ramp": 30, "levels": 1}


def test_the_first_step_has_the_difficulty_at_one():
    """As DeepSpeed's sampler, which counts its own steps from 1."""
    for step in range(1, 12):
        expected = {"ramp": RAMP.pacing.at(step), "levels": LEVELS.pacing.at(step)}
        assert difficulties().at(Progress(iteration=step - 1)) == expected


@over_table("unit", ["iters", "tokens"])
@over_table("ramp", [BatchRamp.constant(4), BatchRamp(2, 2, 12, 6)])
@over_table("start", [0, 3, 5])
def test_the_samples_before_a_piece_are_those_of_whole_steps(unit, ramp, start):
    scale = 1 if unit == "iters" else 7
    ramped = RAMP.model_copy(update={"total_curriculum_step": 6 * scale})
    found = Difficulties.of(DataSamplingConfig(curriculum_metrics=(ramped,), curriculum_unit=unit))
    steps = Steps(ramp, 1, SequenceLengths.constant(2))
    steps = Steps(ramp, 1, steps.lengths, steps.before(start))
    first = found.first_samples(steps)
    assert list(first) == sorted(first)
    progress = steps.start
    for _ in range(20):
        step = steps.at(progress)
        by_samples = max(k for k, begin in enumerate(first) if begin <= progress.samples)
        assert by_samples == found.piece(progress)
        progress = step.after


def test_without_metrics_there_are_none():
    assert Difficulties.of(DataSamplingConfig()) is None


@over_table(
    "pacing",
    [
        Root(8, 30, 10, 8),
        Root(5, 5, 9),
        Root(1, 100, 73, 1, 2.0),
        Discrete((1, 5, 6), (3, 9)),
        Discrete((4,), ()),
    ],
)
def test_where_a_pacing_gets_to_its_end(pacing):
    assert reached(pacing) == pieces(pacing)[-1][0]
