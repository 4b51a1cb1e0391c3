"""This rank's chunks of the model: the pipeline schedule, the partition into chunks, and their modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, reduce
from types import MappingProxyType

import numpy as np
import torch

from megazero.config.derive import PipelineShape
from megazero.config.tree.config import Config
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement, SequenceCut
from megazero.models.batch import MicroBatch
from megazero.models.chunk import ModelChunk, Part, Slice
from megazero.mpu.context import ParallelContext
from megazero.pipeline.actions import Program, Schedule
from megazero.pipeline.lower import lower
from megazero.pipeline.partition import partition_blocks
from megazero.pipeline.schedules import build_schedule
from megazero.spec.resolve import model_spec
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.step.engine import Programs
from megazero.train.step.timers import Timers
from megazero.zero.table import STAGES


def schedule_of(shape: PipelineShape, microbatches: int | None = None) -> Schedule:
    """The schedule of a pipeline; without `microbatches`, of some number that it accepts."""
    count = microbatches or 2 * (shape.group or shape.stages)
    return build_schedule(shape.kind, shape.stages, count, shape.chunks_per_stage, group=shape.group)


def programs_of(zero: ZeroConfig, shape: PipelineShape) -> Programs:
    """The programs of training steps and evaluations, by the number of micro-batches per replica."""
    row, overlap = STAGES[zero.stage], zero.overlap_grad_reduce

    @cache
    def train(microbatches: int) -> Program:
        return lower(
            schedule_of(shape, microbatches),
            gather=row.shard_params,
            reduce_every_microbatch=row.shard_grads,
            overlap_reduce=overlap,
        )

    @cache
    def evaluate(microbatches: int) -> Program:
        stages, chunks = shape.stages, shape.chunks_per_stage
        forward = build_schedule("forward", stages, microbatches, chunks, v_shape=shape.kind == "zb-v")
        return lower(forward, gather=row.shard_params, reduce_every_microbatch=False)

    return Programs(train, evaluate)


DTYPES = MappingProxyType({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16})


def placement_of(
    parallel: ParallelConfig, dtype: str, context: ParallelContext, device: torch.device
) -> Placement:
    """The placement of this rank's layers on a device."""
    placement = Placement.of(
        context,
        DTYPES[dtype],
        cut=SequenceCut.of(parallel),
        token_dispatcher=parallel.moe_token_dispatcher_type,
    )
    return replace(placement, device=device)


Costs = Sequence[float]
"""The cost of each block, in model order."""


def assign_parts(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> list[tuple[Part, ...]]:
    """Partition the model into chunks by `--pipeline-partition`; return the parts of each.

    Raises:
        ConfigError: there are fewer layers than chunks, or the given numbers of layers do not fit.
    """
    method = config.parallel.pipeline_partition
    blocks = family_of(config.model).models.blocks(config, vocabulary.padded)
    weigh = _METHODS.get(method)
    costs = weigh(config, vocabulary, context) if weigh else [1.0] * len(blocks)
    types = [block.kind if isinstance(block.part, int) else None for block in blocks]
    number = PipelineShape.of(config).chunks
    chunks = partition_blocks(method, number, costs=costs, types=types)
    return [tuple(blocks[number].part for number in numbers) for numbers in chunks]


def parameter_counts(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Costs:
    """Number of parameters of each block, a tied head included, because its stage holds a copy."""
    build = _piece_builder(config, vocabulary, context, torch.device("meta"))
    pieces = [build(block.part) for block in family_of(config.model).models.blocks(config, vocabulary.padded)]
    return [float(sum(p.numel() for p in piece.parameters())) for piece in pieces]


def estimated_costs(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Costs:
    """FLOPs per token of each block; an embedding lookup has none."""
    return [block.flops for block in family_of(config.model).models.blocks(config, vocabulary.padded)]


def measured_costs(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Costs:
    """Measure the seconds of each block's forward and backward: best of three, on the slowest rank.

    Blocks with the same kind, FLOPs and number of parameters are measured once.
    """
    family, shape = family_of(config.model), (config.batch.micro_batch_size, config.model.seq_length)
    arrays = family.samples.random_arrays(np.random.default_rng(0), *shape, vocabulary.size)
    batch = family.samples.collate(config, vocabulary.size, context, None)(arrays, tuple(range(shape[0])))
    blocks = family.models.blocks(config, vocabulary.padded)
    counts = parameter_counts(config, vocabulary, context)
    alike = [(block.kind, block.flops, count) for block, count in zip(blocks, counts, strict=True)]
    firsts = [alike.index(kind) for kind in alike]
    seconds = torch.zeros(len(blocks), dtype=torch.float64, device=context.device)
    build = _piece_builder(config, vocabulary, context, context.device)
    for i in sorted(set(firsts)):
        piece = build(blocks[i].part)
        initialize(piece, config.training.seed, context.place)
        hidden = piece.input_boundary(batch).empty(context.device).zero_()
        seconds[i] = min(_seconds(piece, batch, hidden.requires_grad_()) for _ in range(3))
    context.world.all_reduce(seconds, "max").wait()
    slowest: list[float] = seconds[firsts].tolist()
    return slowest


_METHODS: MappingProxyType[str, Callable[[Config, Vocabulary, ParallelContext], Costs]] = MappingProxyType(
    {"parameters": parameter_counts, "cost": estimated_costs, "measured": measured_costs}
)


def _seconds(chunk: ModelChunk[MicroBatch], batch: MicroBatch, hidden: torch.Tensor) -> float:
    timers = Timers(hidden.device, synchronize=True)
    with timers("block"):
        result = chunk.run(batch, hidden, deferred=None)
        values = (result.hidden, *result.terms.values())
        reduce(torch.add, [value.sum() for value in values if value is not None]).backward()
    return timers.collect()["block"]


def _piece_builder(
    config: Config, vocabulary: Vocabulary, context: ParallelContext, device: torch.device
) -> Callable[[Part], ModelChunk[MicroBatch]]:
    """Return a function that builds one part of the model as a chunk; a tied head gets its own weight."""
    placement = placement_of(config.parallel, config.precision.dtype, context, device)
    whole = _whole(config, vocabulary, placement)
    return lambda part: family_of(config.model).models.chunk(replace(whole, parts=(part,)))


def _whole(config: Config, vocabulary: Vocabulary, placement: Placement) -> Slice:
    spec = model_spec(config.model)
    return Slice(spec, (vocabulary.size, vocabulary.padded), placement, config.recompute)


Chunks = dict[int, ModelChunk[MicroBatch]]
"""Number along the model -> chunk, for the chunks of this rank."""


def build_chunks(
    config: Config, vocabulary: Vocabulary, context: ParallelContext, device: torch.device | None = None
) -> Chunks:
    """Build this rank's chunks: on the meta device, or with `device` there, with initial weights.

    Raises:
        ConfigError: the layers cannot be partitioned as configured.
    """
    family = family_of(config.model)
    placement = placement_of(config.parallel, config.precision.dtype, context, device or torch.device("meta"))
    assigned = assign_parts(config, vocabulary, context)
    stage_of = schedule_of(PipelineShape.of(config)).stage_of
    whole = _whole(config, vocabulary, placement)
    chunks: Chunks = {}
    for number, parts in enumerate(assigned):
        if stage_of[number] != context.pp.rank:
            continue
        tied, copied = {}, set()
        for tie in family.models.ties(whole.spec):
            users = [chunk for chunk, own in enumerate(assigned) if any(part in tie.parts for part in own)]
            if number not in users:
                continue
            # In a V-shaped pipeline the first and the last chunk are on one stage and share a weight.
            here = [chunk for chunk in users if stage_of[chunk] == context.pp.rank]
            if here[0] != number:
                tied[tie.weight] = chunks[here[0]].weight(tie.weight)
            if len(here) < len(users):
                copied.add(tie.weight)
        held = replace(whole, parts=parts, tied=tied, copied=frozenset(copied))
        chunks[number] = family.models.chunk(held)
        if device is not None:
            initialize(chunks[number], config.training.seed, context.place)
    return chunks
