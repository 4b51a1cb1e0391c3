"""Rules about curricula over samples, each of which is about every metric by itself."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.fields import paths
from megazero.config.pacing import MOST_CHANGES, Root
from megazero.config.rules.rule import Case, Rule, rule
from megazero.config.tree.data_sampling import CurriculumMetric


def _each(remedy: str, *shown: str) -> Callable[[Callable[[CurriculumMetric], bool]], Rule]:
    """Make a rule for each metric; a violation names the metrics that break it, with the settings `shown`."""

    def of(holds: Callable[[CurriculumMetric], bool]) -> Rule:
        def all_hold(case: Case) -> bool:
            return all(map(holds, case.config.data_sampling.curriculum_metrics))

        def facts(case: Case) -> str:
            broken = (m for m in case.config.data_sampling.curriculum_metrics if not holds(m))
            return "; ".join(f"{m.name} has {', '.join(_said(m, name) for name in shown)}" for m in broken)

        all_hold.__name__, all_hold.__doc__ = holds.__name__, holds.__doc__
        return rule((paths.data_sampling.curriculum_metrics,), remedy, facts=facts)(all_hold)

    return of


def _said(metric: CurriculumMetric, setting: str) -> str:
    value = getattr(metric, setting)
    return f"{setting} {'unset' if value in (None, (), '') else value}"


@_each("name the analyzer's files", "index_to_sample_path", "index_to_metric_path")
def metric_has_its_index(metric: CurriculumMetric) -> bool:
    """`index_to_sample_path` of each of `curriculum_metrics` must be set, and `index_to_metric_path` with a
    `difficulty_type` of value"""
    by_value = metric.difficulty_type == "value"
    return bool(metric.index_to_sample_path and (metric.index_to_metric_path or not by_value))


@_each("set `--seqlen-schedule` to cut samples after they are drawn", "clustering_type")
def metric_is_sampled_by(metric: CurriculumMetric) -> bool:
    """`clustering_type` of each of `curriculum_metrics` must be schedule_based"""
    return metric.clustering_type == "schedule_based"


@_each(
    "say where the ramp begins and ends and how long it takes",
    *("schedule_type", "min_difficulty", "max_difficulty", "total_curriculum_step", "difficulty_step"),
)
def metric_ramp_has_its_numbers(metric: CurriculumMetric) -> bool:
    """`min_difficulty`, `max_difficulty` and `total_curriculum_step` of `curriculum_metrics` must be set with
    a `schedule_type` of fixed_linear or fixed_root; with others, `total_curriculum_step` and
    `difficulty_step` must be left out"""
    if metric.schedule_type == "fixed_discrete":
        return metric.total_curriculum_step is None and metric.difficulty_step == 1
    return None not in (metric.min_difficulty, metric.end, metric.total_curriculum_step)


@_each("set it, or leave it out", "schedule_type", "root_degree")
def metric_root_has_a_degree(metric: CurriculumMetric) -> bool:
    """`root_degree` of `curriculum_metrics` must be set with a `schedule_type` of fixed_root, and with no
    other"""
    return (metric.schedule_type == "fixed_root") == (metric.root_degree is not None)


@_each("name a last step for each difficulty but the last", "schedule_type", "difficulty", "max_step")
def metric_levels_fit(metric: CurriculumMetric) -> bool:
    """`difficulty` and `max_step` of `curriculum_metrics` must grow, one difficulty more than steps, with a
    `schedule_type` of fixed_discrete, and be left out with others"""
    if metric.schedule_type == "fixed_discrete":
        return metric.pacing is not None
    return not metric.difficulty and not metric.max_step


@_each("let them grow", "min_difficulty", "difficulty", "max_difficulty")
def metric_difficulty_grows(metric: CurriculumMetric) -> bool:
    """difficulties of `curriculum_metrics` must lie from `min_difficulty` to `max_difficulty`, which is 100
    for percentiles if unset"""
    levels = _levels(metric)
    return levels == sorted(levels)


@_each(
    "give shares of the samples in percent, or the type `value`",
    *("min_difficulty", "difficulty", "max_difficulty"),
)
def percentile_within_hundred(metric: CurriculumMetric) -> bool:
    """difficulties of `curriculum_metrics` must be from 1 to 100 with a `difficulty_type` of percentile"""
    return metric.difficulty_type == "value" or all(1 <= level <= 100 for level in _levels(metric))


def _levels(metric: CurriculumMetric) -> list[int]:
    """The difficulties that are given, from the first to the last."""
    levels = (metric.min_difficulty, *metric.difficulty, metric.end)
    return [level for level in levels if level is not None]


@_each("raise `difficulty_step`", "min_difficulty", "max_difficulty", "difficulty_step")
def metric_changes_countable(metric: CurriculumMetric) -> bool:
    """a ramp of `curriculum_metrics` must have at most 100000 steps of difficulty"""
    pacing = metric.pacing
    return not isinstance(pacing, Root) or (pacing.hardest - pacing.easiest) // pacing.step <= MOST_CHANGES
