"""Trainings of another length: all settings that count steps, samples or tokens, at the same share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megazero.config.fields import FIELD_BY_PATH
from megazero.config.metric_text import as_mapping
from megazero.config.steps import UNITS
from megazero.config.tree.data_sampling import CurriculumMetric

METRICS = "data_sampling.curriculum_metrics"
"""The setting whose values hold schedules of their own."""

_LENGTHS = (
    *(f"training.train_{unit}" for unit in UNITS),
    *(f"optimizer.lr_{part}_{unit}" for part in ("warmup", "decay", "wsd_decay") for unit in UNITS),
    "training.eval_interval",
    "distillation.kd_train_iters",
    "curriculum.seqlen_total_curriculum_step",
    "curriculum.seqlen_max_step",
    "skipping.random_ltd_require_steps",
)
_RATES = ("skipping.pld_gamma",)  # what happens per step
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
    changed = {path: _times(given[path], share) for path in _LENGTHS if given.get(path)}
    changed |= {path: given[path] / share for path in _RATES if given.get(path)}
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
