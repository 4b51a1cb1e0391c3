"""`curriculum_learning` over the sequence length, and `data_efficiency`: samples by difficulty."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from megazero.config.deepspeed.section import (
    COUNTS,
    NOTHING,
    Bool,
    Count,
    Declared,
    JsonSection,
    Object,
    Size,
    Text,
    Values,
    does,
    if_enabled,
    ignored,
    only,
    refused,
    sets,
)
from megazero.config.metric_text import metrics_of
from megazero.config.tree.data_sampling import CurriculumMetric

_RAMPS = ("fixed_linear", "fixed_root")


def _length(name: str, *schedules: str) -> Declared:
    """Declare a key whose value is taken with these schedules; the others do not read it."""

    def convert(value: object, values: Values) -> object:
        return value if values.get("curriculum_learning.schedule_type") in schedules else NOTHING

    return sets(f"curriculum.seqlen_{name}", convert=convert)


class Curriculum(JsonSection):
    """`curriculum_learning`."""

    at, heading, when = "curriculum_learning", "Curriculum", "curriculum_learning.enabled"

    # `schedule_type` sets the field, and `enabled` only turns it on.
    enabled: Bool = does(fields=("curriculum.seqlen_schedule",))
    curriculum_type: Text = refused("the only difficulty is seqlen", only("seqlen"), when="")
    schedule_type: Text = sets(
        "curriculum.seqlen_schedule",
        only=only(*_RAMPS, "fixed_discrete", "custom"),
        refused="there are no others; custom takes its function from --seqlen-custom-schedule",
    )
    min_difficulty: Count = _length("min_difficulty", *_RAMPS)
    max_difficulty: Count = _length("max_difficulty", *_RAMPS, "custom")


class CurriculumSchedule(JsonSection):
    """`curriculum_learning.schedule_config`."""

    at, heading, when = "curriculum_learning.schedule_config", "Curriculum", "curriculum_learning.enabled"

    total_curriculum_step: Count = _length("total_curriculum_step", *_RAMPS)
    difficulty_step: Count = _length("difficulty_step", *_RAMPS)
    root_degree: Count = _length("root_degree", "fixed_root")
    difficulty: Annotated[Declared, COUNTS] = _length("difficulty", "fixed_discrete")
    max_step: Annotated[Declared, COUNTS] = _length("max_step", "fixed_discrete")


_ROOT = "data_efficiency"
_SAMPLING = f"{_ROOT}.data_sampling"
_LEARNING = f"{_SAMPLING}.curriculum_learning"
_METRICS = f"{_LEARNING}.curriculum_metrics"
_FIELD = "data_sampling.curriculum_metrics"

LENGTHS: Mapping[str, str] = MappingProxyType(
    {"seqlen": "truncate", "seqlen_truncate": "truncate", "seqlen_reshape": "reshape"}
)
"""Metric that, as a single cluster, gives the length that drawn samples are cut to -> kind of cut."""
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


def _metrics(given: Values, values: Values) -> tuple[object, ...]:
    """Return the metrics to sample by, and the settings of the one that cuts samples; NOTHING for none."""
    metrics, _ = metrics_of(given)
    sampled = tuple(metric for metric in metrics if not _cuts(metric))
    cut = next((metric for metric in metrics if _cuts(metric)), None)
    lengths = (NOTHING if cut is None else _length_of(cut, name) for name in _OF_LENGTHS)
    return (sampled or NOTHING, NOTHING if cut is None else LENGTHS[cut.name], *lengths)


def _length_of(metric: CurriculumMetric, name: str) -> object:
    value = getattr(metric, name)
    unread = metric.schedule_type == "fixed_discrete" and name in _OF_A_RAMP
    return NOTHING if unread or value in (None, ()) else value


def _faults(given: Values, values: Values) -> list[str]:
    """Return the faults of the metrics, as sentences without a period."""
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


class DataEfficiency(JsonSection):
    """`data_efficiency`."""

    at, heading = _ROOT, "Data efficiency"

    # The metrics and the switch of random-LTD set the fields, and `enabled` only turns them on.
    enabled: Bool = does(
        False,
        fields=(_FIELD, "skipping.random_ltd"),
        getter="data_efficiency_enabled",
        attribute="data_efficiency_enabled",
    )
    seed: Size = sets("data_sampling.curriculum_seed", when=f"{_LEARNING}.enabled")


class DataSampling(JsonSection):
    """`data_efficiency.data_sampling`."""

    at, heading = _SAMPLING, "Data efficiency"

    enabled: Bool = does(False, fields=(_FIELD,), when=f"{_ROOT}.enabled", getter="data_sampling_enabled")
    num_epochs: Size = ignored("samples are drawn for as long as the training lasts")
    num_workers: Size = ignored("`--num-workers` says how many batches are read ahead")
    pin_memory: Bool = ignored("only speed depends on it")
    dynamic_batching: Object = does(
        convert=if_enabled,
        extra="sections.dynamic_batching",
        when=f"{_SAMPLING}.enabled",
        script_refused="all batches of a step have as many samples; leave the section out, or set "
        "`enabled` to false",
    )


class CurriculumLearning(JsonSection):
    """`data_efficiency.data_sampling.curriculum_learning`."""

    at, heading = _LEARNING, "Data efficiency"

    enabled: Bool = does(
        False,
        fields=(_FIELD,),
        when=f"{_SAMPLING}.enabled",
        faults=_needs_metrics,
        getter="curriculum_learning_enabled",
    )
    curriculum_metrics: Object = sets(
        _FIELD,
        "curriculum.seqlen_kind",
        *(f"curriculum.{name}" for name in _OF_LENGTHS.values()),
        convert=_metrics,
        when=f"{_LEARNING}.enabled",
        faults=_faults,
    )
    data_cluster_path: Text = ignored(
        "which samples may be drawn follows from the index, and nothing is written"
    )
