from __future__ import annotations

import numpy as np
import pytest

from megazero.config.difficulties import Difficulties
from megazero.config.tree.data_sampling import CurriculumMetric, DataSamplingConfig
from megazero.data_efficiency.eligibility import EligibilityOrder, eligible_samples
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.errors import DataError
from tests.tables import over_table


def index_of(values: np.ndarray) -> MetricIndex:
    """The index of samples with these values."""
    distinct, counts = np.unique(values, return_counts=True)
    return MetricIndex(distinct, np.cumsum(counts), np.argsort(values, kind="stable"))


def levels(name: str, difficulty: tuple[int, ...], kind: str = "value") -> CurriculumMetric:
    return CurriculumMetric(
        name=name,
        difficulty_type=kind,
        schedule_type="fixed_discrete",
        difficulty=difficulty,
        max_step=tuple(range(1, len(difficulty))),
    )


def curriculum(*metrics: CurriculumMetric) -> Difficulties:
    return Difficulties.of(DataSamplingConfig(curriculum_metrics=metrics))


VALUES = np.array([5, 3, 9, 3, 7])


@over_table(("level", "count"), [(2, 0), (3, 2), (4, 2), (5, 3), (8, 4), (9, 5), (10**9, 5)])
def test_by_value(level, count):
    assert eligible_samples(index_of(VALUES), levels("m", (1,)), level) == count


@over_table(("level", "count"), [(1, 0), (19, 0), (20, 1), (50, 2), (99, 4), (100, 5)])
def test_by_percentile(level, count):
    assert eligible_samples(index_of(VALUES), levels("m", (1,), "percentile"), level) == count


@over_table("size", [100, 12_345, 99_999])
def test_a_percentile_is_deepspeed_s_to_a_percent_of_a_sample_each(size):
    """Its percent is a whole number of samples; the last one takes what is left."""
    index, metric = index_of(np.arange(size)), levels("m", (1,), "percentile")
    for level in range(1, 101):
        theirs = size if level == 100 else size // 100 * level
        assert 0 <= eligible_samples(index, metric, level) - theirs < 100


def test_one_metric_s_own_order_is_taken():
    index = index_of(VALUES)
    order = EligibilityOrder.of(curriculum(levels("m", (3, 6, 8))), [index])
    assert order.samples is index.samples
    assert order.ends == (2, 3, 4)


@over_table("seed", range(20))
def test_several_metrics_leave_what_is_within_all_of_them(seed):
    """As in DeepSpeed: an intersection of everything up to the difficulties of the step."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 10, (3, 40))
    metrics = [levels("a", (6, 7, 9)), levels("b", (5, 8)), levels("c", (60, 70, 90, 100), "percentile")]
    difficulties, indexes = curriculum(*metrics), [index_of(each) for each in values]
    order = EligibilityOrder.of(difficulties, indexes)
    assert sorted(order.samples.tolist()) == list(range(40))
    assert len(order.ends) == len(difficulties.levels) == 4
    for (a, b, c), end in zip(difficulties.levels, order.ends, strict=True):
        easy = set(indexes[2].samples[: eligible_samples(indexes[2], metrics[2], c)].tolist())
        expected = {i for i in easy if values[0, i] <= a and values[1, i] <= b}
        assert set(order.samples[:end].tolist()) == expected


def test_in_the_end_all_samples_are_eligible():
    order = EligibilityOrder.of(
        curriculum(levels("a", (5, 9)), levels("b", (50, 100), "percentile")), [index_of(VALUES)] * 2
    )
    assert order.ends[-1] == 5


def test_nothing_to_begin_with_is_said_at_once():
    """DeepSpeed divides by the size of its first cluster."""
    with pytest.raises(DataError, match=r"none \(rare has 0 of 5 within value 2, the least value is 3\)"):
        EligibilityOrder.of(curriculum(levels("rare", (2, 9))), [index_of(VALUES)])
    backwards = index_of(-VALUES)
    with pytest.raises(DataError, match="first step.*a has 2 of 5 within value 3.*b has 1 of 5"):
        EligibilityOrder.of(
            curriculum(levels("a", (3, 9)), levels("b", (-9, 0))), [index_of(VALUES), backwards]
        )


def test_a_sample_twice_in_one_of_several_is_found():
    twice = MetricIndex(np.array([1]), np.array([5]), np.array([0, 1, 2, 2, 4]))
    with pytest.raises(DataError, match="2 must come once in b"):
        EligibilityOrder.of(curriculum(levels("a", (9,)), levels("b", (9,))), [index_of(VALUES), twice])
