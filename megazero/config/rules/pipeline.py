"""Rules about pipeline stages: their chunks, schedules and partition."""

from __future__ import annotations

import re

from megazero.config.derive import PipelineShape, fills_groups
from megazero.config.fields import paths
from megazero.config.rules.rule import MOST_INCREMENTS, Case, Rule
from megazero.config.steps import BatchRamp

_BATCH, _MODEL, _PARALLEL = paths.batch, paths.model, paths.parallel

PARTITION_METHODS = ("uniform", "parameters", "cost", "measured")
_VIRTUAL = (_PARALLEL.num_layers_per_virtual_pipeline_stage, _PARALLEL.num_virtual_stages_per_pipeline_rank)
_STAGES = _PARALLEL.pipeline_model_parallel_size
_GROUP = _PARALLEL.microbatch_group_size_per_virtual_pipeline_stage


def _shape(case: Case) -> PipelineShape:
    return PipelineShape.of(case.config)


def _layers_divide(case: Case) -> bool:
    parallel, per_chunk = case.config.parallel, case.config.parallel.num_layers_per_virtual_pipeline_stage
    return (
        per_chunk is None
        or case.config.model.num_layers % (parallel.pipeline_model_parallel_size * per_chunk) == 0
    )


def _virtual_stages_run(case: Case) -> bool:
    parallel = case.config.parallel
    virtual = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
    if virtual == (None, None) or (
        parallel.pipeline_schedule != "zb-v" and _shape(case).chunks_per_stage == 1
    ):
        return True
    return parallel.pipeline_schedule in ("auto", "interleaved") and parallel.pipeline_model_parallel_size > 1


def _chunk_clause(case: Case) -> str:
    layers, chunks = case.config.model.num_layers, _shape(case).chunks_per_stage
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
    ramp = BatchRamp.of(batch, case.config.model, case.data_parallel)
    uneven = isinstance(ramp, BatchRamp) and (
        ramp.start > ramp.final or (ramp.final - ramp.start) % ramp.increment
    )
    if uneven or ramp.increments > MOST_INCREMENTS:
        return []
    return [] if any(size % unit for size in ramp.sizes) else [size // unit for size in ramp.sizes]


def _interleaved_rounds(case: Case) -> bool:
    shape = _shape(case)
    if shape.kind != "interleaved":
        return True
    group = shape.group or shape.stages
    return all(fills_groups(shape.stages, count, group) for count in micro_batch_counts(case))


def _partition_fault(case: Case) -> str | None:
    """The fault of `pipeline_partition`; None if it is sound."""
    method = case.config.parallel.pipeline_partition
    if method in PARTITION_METHODS:
        return None
    if method.startswith("type:"):
        return _regex_fault(method.removeprefix("type:"))
    numbers = [int(part) for part in method.split(",") if part.strip().isdecimal()]
    if len(numbers) != method.count(",") + 1:
        return f"it is not one of {', '.join(PARTITION_METHODS)}, type:REGEX or numbers of layers"
    chunks, layers = _shape(case).chunks, case.config.model.num_layers
    if len(numbers) != chunks or sum(numbers) != layers or 0 in numbers:
        return f"{chunks} positive numbers that add up to {layers} are needed"
    return None


def _regex_fault(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"the regular expression is not valid: {error}"
    return None if pattern else "the regular expression is empty"


PIPELINE_RULES: tuple[Rule, ...] = (
    Rule(
        "layers_fill_virtual_stages",
        (_MODEL.num_layers, _STAGES, _VIRTUAL[0]),
        "`num_layers` must be a multiple of `pipeline_model_parallel_size` x "
        "`num_layers_per_virtual_pipeline_stage`",
        "choose another number of layers per virtual stage, or set `--num-virtual-stages-per-pipeline-rank` "
        "instead, which splits layers unevenly if it must",
        _layers_divide,
    ),
    Rule(
        "virtual_stages_need_interleaving",
        (*_VIRTUAL, _PARALLEL.pipeline_schedule, _STAGES),
        "virtual stages must go with `pipeline_schedule` auto or interleaved and at least 2 pipeline stages",
        "leave the virtual stages out (zb-v always has two chunks per stage) or change the schedule",
        _virtual_stages_run,
    ),
    Rule(
        "chunks_within_layers",
        (_MODEL.num_layers, _STAGES, _PARALLEL.pipeline_schedule, *_VIRTUAL),
        "`num_layers` must be at least the number of model chunks (pipeline stages x chunks per stage)",
        "use fewer stages or fewer virtual stages",
        lambda c: _shape(c).chunks <= c.config.model.num_layers,
        _chunk_clause,
    ),
    Rule(
        "interleaved_micro_batches",
        (_PARALLEL.pipeline_schedule, _STAGES, _GROUP, _BATCH.micro_batch_size, _BATCH.global_batch_size),
        "the number of micro-batches per step must be a multiple of `pipeline_model_parallel_size` with the "
        "interleaved schedule, or fill groups of `microbatch_group_size_per_virtual_pipeline_stage`, none of "
        "which has fewer of them than there are stages",
        "change a batch size or the groups, or leave out the virtual stages",
        _interleaved_rounds,
        lambda c: f"micro-batches per step: {', '.join(map(str, micro_batch_counts(c)))}",
    ),
    Rule(
        "partition_well_formed",
        (_PARALLEL.pipeline_partition,),
        "`pipeline_partition` must be uniform, parameters, cost, measured, type:REGEX, or one number of "
        "layers for each model chunk",
        "correct it, or leave it out for an even partition",
        lambda c: _partition_fault(c) is None,
        lambda c: _partition_fault(c) or "",
    ),
)
