"""Trainings of another length: all settings that count steps, samples or tokens, at the same share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megazero.config.fields import FIELD_BY_PATH, fields_with
from megazero.config.metric_text import as_mapping
from megazero.config.tree.data_sampling import CurriculumMetric
from megazero.config.tree.roles import Role

METRICS = "data_sampling.curriculum_metrics"
"""The setting whose values hold schedules of their own."""

_RAMP = "batch.rampup_batch_size"  # (first size, increment, samples)
_STAIRS = "batch.step_batch_size_schedule"  # tokens:size, ...
_OF_METRICS = ("total_curriculum_step", "max_step")


def scaled(given: Mapping[str, Any], share: float) -> dict[str, Any]:
    """The settings of a training `share` times as long, with every event at the same fraction of it.

    Schedules of a user's own function stay: nothing here knows what they count.

    Args:
        given: the settings of a file, by path.
        share: greater than 0. Counts are rounded, to 1 at least.
    """
    lengths, rates = ([s.path for s in fields_with(r) if given.get(s.path)] for r in (Role.LENGTH, Role.RATE))
    changed = {path: _times(given[path], share) for path in lengths}
    changed |= {path: given[path] / share for path in rates}
    if given.get(_RAMP):
        *sizes, samples = given[_RAMP]
        changed[_RAMP] = (*sizes, _times(samples, share))
    if given.get(_STAIRS):
        pairs = (stair.split(":") for stair in given[_STAIRS])
        changed[_STAIRS] = tuple(
            f"{int(tokens) and _times(int(tokens), share)}:{size}" for tokens, size in pairs
        )
    if given.get(METRICS):
        changed[METRICS] = tuple(_metric(metric, share) for metric in given[METRICS])
    return changed


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """The flags that give `settings`, a mapping of path to value."""
    words = []
    for path, value in settings.items():
        texts = [json.dumps(as_mapping(value))] if path == METRICS else _texts(value)
        words += [FIELD_BY_PATH[path].flag, *texts]
    return words


def share_of(given: Mapping[str, Any], steps: int) -> float | None:
    """The part of the training that `steps` are; None if its length is not given in steps."""
    whole = given.get("training.train_iters")
    return steps / whole if whole else None


def _metric(metric: CurriculumMetric, share: float) -> CurriculumMetric:
    counts = {name: _times(value, share) for name in _OF_METRICS if (value := getattr(metric, name))}
    return metric.model_copy(update=counts)


def _times(value: Any, share: float) -> Any:
    if isinstance(value, tuple):
        return tuple(_times(item, share) for item in value)
    return max(1, round(value * share))


def _texts(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, tuple) else [str(value)]
