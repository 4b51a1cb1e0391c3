"""Programs of the pipeline's stages for a step: the configured schedule, lowered for the ZeRO stage."""

from __future__ import annotations

from megazero.config.derive import chunks_per_stage, schedule_kind
from megazero.config.tree import Config
from megazero.pipeline import Program, Schedule, build_schedule, lower
from megazero.zero import STAGES


def schedule_of(config: Config, microbatches: int | None = None, *, forward_only: bool = False) -> Schedule:
    """The configured pipeline schedule; `microbatches` may be left out if only the stages matter."""
    stages, per_stage = config.parallel.pipeline_model_parallel_size, chunks_per_stage(config)
    kind = schedule_kind(config)
    count = microbatches or 2 * stages
    if forward_only:
        return build_schedule("forward", stages, count, per_stage, v_shape=kind == "zb-v")
    return build_schedule(kind, stages, count, per_stage)


def train_program(config: Config, microbatches: int) -> Program:
    """The program of a training step with this many micro-batches per replica."""
    row = STAGES[config.zero.stage]
    schedule = schedule_of(config, microbatches)
    return lower(
        schedule,
        gather=row.shard_params,
        reduce_every_microbatch=row.shard_grads,
        overlap_reduce=config.zero.overlap_grad_reduce,
    )


def evaluation_program(config: Config, microbatches: int) -> Program:
    """The program of an evaluation of this many micro-batches per replica."""
    row = STAGES[config.zero.stage]
    schedule = schedule_of(config, microbatches, forward_only=True)
    return lower(schedule, gather=row.shard_params, reduce_every_microbatch=False)
