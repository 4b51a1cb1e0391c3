"""Rows of the DeepSpeed table: the section `data_efficiency`, which samples are drawn by difficulty."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megazero.config.deepspeed.row import (
    BOOL,
    NOTHING,
    SECTION,
    SIZE,
    TEXT,
    KeyRow,
    Values,
    if_enabled,
    ignores,
    sets,
)
from megazero.config.metric_text import metrics_of
from megazero.config.tree.data_sampling import CurriculumMetric

_ROOT = "data_efficiency"
_SAMPLING = f"{_ROOT}.data_sampling"
_LEARNING = f"{_SAMPLING}.curriculum_learning"
_METRICS = f"{_LEARNING}.curriculum_metrics"
_FIELD = "data_sampling.curriculum_metrics"

LENGTHS: Mapping[str, str] = MappingProxyType(
    {"seqlen": "truncate", "seqlen_truncate": "truncate", "seqlen_reshape": "reshape"}
)
"""Metrics that, as a single cluster, are lengths that drawn samples are cut to -> how they are."""
_OF_LENGTHS: Mapping[str, str] = MappingProxyType(
    {
        "schedule_type": "seqlen_schedule",
        "min_difficulty": "seqlen_min_difficulty",
        "max_difficulty": "seqlen_max_difficulty",
        "total_curriculum_step": "seqlen_total_curriculum_step",
        "difficulty_step": "seqlen_difficulty_step",
        "root_degree": "seqlen_root_degree",
        "difficulty": "seqlen_difficulty",
        "max_step": "seqlen_max_step",
    }
)
"""A metric's settings -> those of a curriculum over the sequence length."""
_OF_A_RAMP = ("min_difficulty", "max_difficulty", "total_curriculum_step", "difficulty_step", "root_degree")


def _cuts(metric: CurriculumMetric) -> bool:
    return metric.clustering_type == "single_cluster" and metric.name in LENGTHS


def _convert(given: Mapping[str, Any], values: Values) -> tuple[Any, ...]:
    """The metrics to sample by, and the lengths of the one that cuts; NOTHING for what is not given."""
    metrics, _ = metrics_of(given)
    sampled = tuple(metric for metric in metrics if not _cuts(metric))
    cut = next((metric for metric in metrics if _cuts(metric)), None)
    lengths = (NOTHING if cut is None else _length(cut, name) for name in _OF_LENGTHS)
    return (sampled or NOTHING, NOTHING if cut is None else LENGTHS[cut.name], *lengths)


def _length(metric: CurriculumMetric, name: str) -> Any:
    value = getattr(metric, name)
    unread = metric.schedule_type == "fixed_discrete" and name in _OF_A_RAMP
    return NOTHING if unread or value in (None, ()) else value


def _faults(given: Mapping[str, Any], values: Values) -> list[str]:
    """The faults of metrics, as sentences without an end."""
    metrics, faults = metrics_of(given, f"{_METRICS}.")
    cuts = [metric.name for metric in metrics if _cuts(metric)]
    if len(cuts) > 1:
        faults.append(f"`{_METRICS}` must have one length at most, but has {' and '.join(cuts)}; keep one")
    for metric in metrics:
        path = f"{_METRICS}.{metric.name}"
        if _cuts(metric) and metric.difficulty_type != "value":
            faults.append(f"`{path}.difficulty_type` must be value for a length, but is percentile")
        elif metric.name in ("seqlen_truncate", "seqlen_reshape") and not _cuts(metric):
            faults.append(
                f"`{path}.clustering_type` must be single_cluster, as samples are cut after they are drawn, "
                "but is schedule_based; sample by the metric `seqlen`"
            )
        elif metric.clustering_type == "single_cluster" and not _cuts(metric):
            faults.append(
                f"`{path}.clustering_type` must be schedule_based, as a single_cluster is left to a script's "
                "own function, which is not offered, but is single_cluster; give its index"
            )
    return faults


def _needs_metrics(on: bool, values: Values) -> list[str]:
    if on and not values.get(_METRICS):
        return [f"`{_METRICS}` must name metrics where `{_LEARNING}.enabled` is true, but does not; name one"]
    return []


DATA_EFFICIENCY_ROWS: tuple[KeyRow, ...] = (
    # Parts of what the metrics say: they count if all three switches are on. The first is random-LTD's too.
    KeyRow(f"{_ROOT}.enabled", BOOL, (_FIELD, "skipping.random_ltd")),
    KeyRow(f"{_SAMPLING}.enabled", BOOL, (_FIELD,), when=f"{_ROOT}.enabled"),
    KeyRow(f"{_LEARNING}.enabled", BOOL, (_FIELD,), when=f"{_SAMPLING}.enabled", faults=_needs_metrics),
    KeyRow(
        _METRICS,
        SECTION,
        (_FIELD, "curriculum.seqlen_kind", *(f"curriculum.{name}" for name in _OF_LENGTHS.values())),
        _convert,
        when=f"{_LEARNING}.enabled",
        faults=_faults,
    ),
    sets(f"{_ROOT}.seed", SIZE, "data_sampling.curriculum_seed", when=f"{_LEARNING}.enabled"),
    *ignores(
        "which samples may be drawn follows from the index, and nothing is written",
        TEXT,
        f"{_LEARNING}.data_cluster_path",
    ),
    *ignores("samples are drawn for as long as the training lasts", SIZE, f"{_SAMPLING}.num_epochs"),
    *ignores("`--num-workers` says how many batches are read ahead", SIZE, f"{_SAMPLING}.num_workers"),
    *ignores("only speed depends on it", BOOL, f"{_SAMPLING}.pin_memory"),
    KeyRow(
        f"{_SAMPLING}.dynamic_batching",
        SECTION,
        convert=if_enabled,
        extra="sections.dynamic_batching",
        when=f"{_SAMPLING}.enabled",
        script_refused="all batches of a step have as many samples; leave the section out, or set "
        "`enabled` to false",
    ),
)
