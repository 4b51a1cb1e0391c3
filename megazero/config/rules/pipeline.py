"""Rules about pipeline stages: their chunks, schedules and partition."""

from __future__ import annotations

import re

from megazero.config.derive import PipelineShape, fills_groups
from megazero.config.fields import paths
from megazero.config.rules.rule import MOST_INCREMENTS, Case, rule
from megazero.config.steps import BatchRamp

_BATCH, _MODEL, _PARALLEL = paths.batch, paths.model, paths.parallel

PARTITION_METHODS = ("uniform", "parameters", "cost", "measured")
_VIRTUAL = (_PARALLEL.num_layers_per_virtual_pipeline_stage, _PARALLEL.num_virtual_stages_per_pipeline_rank)
_STAGES = _PARALLEL.pipeline_model_parallel_size
_GROUP = _PARALLEL.microbatch_group_size_per_virtual_pipeline_stage


def _shape(case: Case) -> PipelineShape:
    return PipelineShape.of(case.config)


def _chunk_clause(case: Case) -> str:
    layers, chunks = case.model.num_layers, _shape(case).chunks_per_stage
    fit = "fewer fit"
    if layers >= chunks:
        fit = f"{layers} layers suffice for {layers // chunks} stages of {chunks}"
    return f"that makes {_shape(case).chunks} chunks; {fit}"


def micro_batch_counts(case: Case) -> list[int]:
    """The micro-batches per step at each size of the batch ramp, in order (evaluation uses the last).

    Empty if the number of ranks is unknown or a rule about batch sizes is broken.
    """
    batch = case.config.batch
    if case.data_parallel is None or (batch.rampup_batch_size and batch.global_batch_size is None):
        return []
    unit = batch.micro_batch_size * case.data_parallel
    ramp = BatchRamp.of(batch, case.model, case.data_parallel)
    uneven = isinstance(ramp, BatchRamp) and (
        ramp.start > ramp.final or (ramp.final - ramp.start) % ramp.increment
    )
    if uneven or ramp.increments > MOST_INCREMENTS:
        return []
    return [] if any(size % unit for size in ramp.sizes) else [size // unit for size in ramp.sizes]


def _partition_fault(case: Case) -> str | None:
    """The fault of `pipeline_partition`; None if it is sound."""
    method = case.parallel.pipeline_partition
    if method in PARTITION_METHODS:
        return None
    if method.startswith("type:"):
        return _regex_fault(method.removeprefix("type:"))
    numbers = [int(part) for part in method.split(",") if part.strip().isdecimal()]
    if len(numbers) != method.count(",") + 1:
        return f"it is not one of {', '.join(PARTITION_METHODS)}, type:REGEX or numbers of layers"
    chunks, layers = _shape(case).chunks, case.model.num_layers
    if len(numbers) != chunks or sum(numbers) != layers or 0 in numbers:
        return f"{chunks} positive numbers that add up to {layers} are needed"
    return None


def _regex_fault(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"the regular expression is not valid: {error}"
    return None if pattern else "the regular expression is empty"


@rule(
    (_MODEL.num_layers, _STAGES, _VIRTUAL[0]),
    "choose another number of layers per virtual stage, or set `--num-virtual-stages-per-pipeline-rank` "
    "instead, which splits layers unevenly if it must",
)
def layers_fill_virtual_stages(case: Case) -> bool:
    """`num_layers` must be a multiple of `pipeline_model_parallel_size` x
    `num_layers_per_virtual_pipeline_stage`"""
    parallel, per_chunk = case.parallel, case.parallel.num_layers_per_virtual_pipeline_stage
    return (
        per_chunk is None or case.model.num_layers % (parallel.pipeline_model_parallel_size * per_chunk) == 0
    )


@rule(
    (*_VIRTUAL, _PARALLEL.pipeline_schedule, _STAGES),
    "leave the virtual stages out (zb-v always has two chunks per stage) or change the schedule",
)
def virtual_stages_need_interleaving(case: Case) -> bool:
    """virtual stages must go with `pipeline_schedule` auto or interleaved and at least 2 pipeline stages"""
    parallel = case.parallel
    virtual = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
    if virtual == (None, None) or (
        parallel.pipeline_schedule != "zb-v" and _shape(case).chunks_per_stage == 1
    ):
        return True
    return parallel.pipeline_schedule in ("auto", "interleaved") and parallel.pipeline_model_parallel_size > 1


@rule(
    (_MODEL.num_layers, _STAGES, _PARALLEL.pipeline_schedule, *_VIRTUAL),
    "use fewer stages or fewer virtual stages",
    detail=_chunk_clause,
)
def chunks_within_layers(case: Case) -> bool:
    """`num_layers` must be at least the number of model chunks (pipeline stages x chunks per stage)"""
    return _shape(case).chunks <= case.model.num_layers


@rule(
    (_PARALLEL.pipeline_schedule, _STAGES, _GROUP, _BATCH.micro_batch_size, _BATCH.global_batch_size),
    "change a batch size or the groups, or leave out the virtual stages",
    detail=lambda c: f"micro-batches per step: {', '.join(map(str, micro_batch_counts(c)))}",
)
def interleaved_micro_batches(case: Case) -> bool:
    """the number of micro-batches per step must be a multiple of `pipeline_model_parallel_size` with the
    interleaved schedule, or fill groups of `microbatch_group_size_per_virtual_pipeline_stage`, none of which
    has fewer of them than there are stages"""
    shape = _shape(case)
    if shape.kind != "interleaved":
        return True
    group = shape.group or shape.stages
    return all(fills_groups(shape.stages, count, group) for count in micro_batch_counts(case))


@rule(
    (_PARALLEL.pipeline_partition,),
    "correct it, or leave it out for an even partition",
    detail=lambda c: _partition_fault(c) or "",
)
def partition_well_formed(case: Case) -> bool:
    """`pipeline_partition` must be uniform, parameters, cost, measured, type:REGEX, or one number of layers
    for each model chunk"""
    return _partition_fault(case) is None
