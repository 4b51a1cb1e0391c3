"""Rules about curricula over samples."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.fields import paths
from megazero.config.pacing import MOST_CHANGES, Root
from megazero.config.rules.rule import Case, Rule
from megazero.config.tree.data_sampling import CurriculumMetric

_METRICS = paths.data_sampling.curriculum_metrics


def _metrics(case: Case) -> tuple[CurriculumMetric, ...]:
    return case.config.data_sampling.curriculum_metrics


def _has_index(metric: CurriculumMetric) -> bool:
    by_value = metric.difficulty_type == "value"
    return bool(metric.index_to_sample_path and (metric.index_to_metric_path or not by_value))


def _has_its_numbers(metric: CurriculumMetric) -> bool:
    if metric.schedule_type == "fixed_discrete":
        return metric.total_curriculum_step is None and metric.difficulty_step == 1
    return None not in (metric.min_difficulty, metric.end, metric.total_curriculum_step)


def _levels_fit(metric: CurriculumMetric) -> bool:
    if metric.schedule_type == "fixed_discrete":
        return metric.pacing is not None
    return not metric.difficulty and not metric.max_step


def _grows(metric: CurriculumMetric) -> bool:
    """Whether the difficulties lie from the first to the last, where these are given."""
    levels = [level for level in (metric.min_difficulty, *metric.difficulty, metric.end) if level is not None]
    return levels == sorted(levels)


def _within_hundred(metric: CurriculumMetric) -> bool:
    if metric.difficulty_type == "value":
        return True
    levels = (metric.min_difficulty, *metric.difficulty, metric.end)
    return all(1 <= level <= 100 for level in levels if level is not None)


def _changes_rarely(metric: CurriculumMetric) -> bool:
    pacing = metric.pacing
    return not isinstance(pacing, Root) or (pacing.hardest - pacing.easiest) // pacing.step <= MOST_CHANGES


def _each(
    name: str, message: str, remedy: str, holds: Callable[[CurriculumMetric], bool], *shown: str
) -> Rule:
    """A rule for every metric by itself; a violation names those that break it, with these settings."""

    def detail(case: Case) -> str:
        return "; ".join(
            f"{metric.name} has "
            + ", ".join(f"{setting} {_said(getattr(metric, setting))}" for setting in shown)
            for metric in _metrics(case)
            if not holds(metric)
        )

    return Rule(
        name, (_METRICS,), message, remedy, lambda c: all(map(holds, _metrics(c))), detail, in_detail=True
    )


def _said(value: object) -> str:
    return "unset" if value in (None, (), "") else str(value)


DATA_SAMPLING_RULES: tuple[Rule, ...] = (
    _each(
        "metric_has_its_index",
        "`index_to_sample_path` of each of `curriculum_metrics` must be set, and `index_to_metric_path` with "
        "a `difficulty_type` of value",
        "name the analyzer's files",
        _has_index,
        "index_to_sample_path",
        "index_to_metric_path",
    ),
    _each(
        "metric_is_sampled_by",
        "`clustering_type` of each of `curriculum_metrics` must be schedule_based",
        "set `--seqlen-schedule` to cut samples after they are drawn",
        lambda metric: metric.clustering_type == "schedule_based",
        "clustering_type",
    ),
    _each(
        "metric_ramp_has_its_numbers",
        "`min_difficulty`, `max_difficulty` and `total_curriculum_step` of `curriculum_metrics` must be set "
        "with a `schedule_type` of fixed_linear or fixed_root, and the last of these, as `difficulty_step`, "
        "with no other",
        "say where the ramp begins and ends and how long it takes",
        _has_its_numbers,
        "schedule_type",
        "min_difficulty",
        "max_difficulty",
        "total_curriculum_step",
        "difficulty_step",
    ),
    _each(
        "metric_root_has_a_degree",
        "`root_degree` of `curriculum_metrics` must be set with a `schedule_type` of fixed_root, and with no "
        "other",
        "set it, or leave it out",
        lambda metric: (metric.schedule_type == "fixed_root") == (metric.root_degree is not None),
        "schedule_type",
        "root_degree",
    ),
    _each(
        "metric_levels_fit",
        "`difficulty` and `max_step` of `curriculum_metrics` must grow, one difficulty more than steps, with "
        "a `schedule_type` of fixed_discrete, and be left out with others",
        "name a last step for each difficulty but the last",
        _levels_fit,
        "schedule_type",
        "difficulty",
        "max_step",
    ),
    _each(
        "metric_difficulty_grows",
        "difficulties of `curriculum_metrics` must lie from `min_difficulty` to `max_difficulty`, which is "
        "100 for percentiles if unset",
        "let them grow",
        _grows,
        "min_difficulty",
        "difficulty",
        "max_difficulty",
    ),
    _each(
        "percentile_within_hundred",
        "difficulties of `curriculum_metrics` must be from 1 to 100 with a `difficulty_type` of percentile",
        "give shares of the samples in percent, or the type `value`",
        _within_hundred,
        "min_difficulty",
        "difficulty",
        "max_difficulty",
    ),
    _each(
        "metric_changes_countable",
        f"a ramp of `curriculum_metrics` must have at most {MOST_CHANGES} steps of difficulty",
        "raise `difficulty_step`",
        _changes_rarely,
        "min_difficulty",
        "max_difficulty",
        "difficulty_step",
    ),
)
