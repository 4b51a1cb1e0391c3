"""Lengthen or shorten a training, with all its events at the same fractions of its length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megazero.config.fields import FIELD_BY_PATH, fields_with
from megazero.config.metric_text import as_mapping
from megazero.config.tree.data_sampling import CurriculumMetric
from megazero.config.tree.roles import Role

METRICS = "data_sampling.curriculum_metrics"
"""The setting whose values, curriculum metrics, have schedules of their own."""

_RAMP = "batch.rampup_batch_size"  # (first size, increment, samples)
_STAIRS = "batch.step_batch_size_schedule"  # tokens:size, ...
_OF_METRICS = ("total_curriculum_step", "max_step")


def scaled(settings: Mapping[str, Any], share: float) -> dict[str, Any]:
    """The changed settings of a training `share` times as long, by path.

    A schedule by a user's own function stays as it is, because its arguments have no known unit.

    Args:
        settings: the settings of a file, by path.
        share: greater than 0. Counts are rounded, to 1 at least.
    """
    lengths, rates = (
        [spec.path for spec in fields_with(role) if settings.get(spec.path)]
        for role in (Role.LENGTH, Role.RATE)
    )
    changed = {path: _times(settings[path], share) for path in lengths}
    changed |= {path: settings[path] / share for path in rates}
    if settings.get(_RAMP):
        *sizes, samples = settings[_RAMP]
        changed[_RAMP] = (*sizes, _times(samples, share))
    if settings.get(_STAIRS):
        stairs = (stair.split(":") for stair in settings[_STAIRS])
        changed[_STAIRS] = tuple(
            f"{int(tokens) and _times(int(tokens), share)}:{size}" for tokens, size in stairs
        )
    if settings.get(METRICS):
        changed[METRICS] = tuple(_metric(metric, share) for metric in settings[METRICS])
    return changed


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """The command line's flags for `settings`, a mapping of path to value."""
    words = []
    for path, value in settings.items():
        values = value if isinstance(value, tuple) else (value,)
        texts = [json.dumps(as_mapping(value))] if path == METRICS else map(str, values)
        words += [FIELD_BY_PATH[path].flag, *texts]
    return words


def share_of(settings: Mapping[str, Any], steps: int) -> float | None:
    """`steps` as a fraction of the training's length; None if its length is not given in steps."""
    whole = settings.get("training.train_iters")
    return steps / whole if whole else None


def _metric(metric: CurriculumMetric, share: float) -> CurriculumMetric:
    counts = {name: _times(value, share) for name in _OF_METRICS if (value := getattr(metric, name))}
    return metric.model_copy(update=counts)


def _times(value: Any, share: float) -> Any:
    if isinstance(value, tuple):
        return tuple(_times(item, share) for item in value)
    return max(1, round(value * share))
