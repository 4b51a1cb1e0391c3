"""This rank's parts of the model: the schedule of the stages, the layers of each chunk, and the chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, reduce
from types import MappingProxyType

import numpy as np
import torch

from megazero.config.derive import chunks_per_stage, schedule_kind
from megazero.config.tree import Config, ParallelConfig
from megazero.layers import Placement, initialize
from megazero.models import ChunkSpan, MicroBatch, ModelChunk
from megazero.mpu import ParallelContext
from megazero.pipeline import Program, Schedule, build_schedule, lower, partition_layers
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.step.engine import Programs
from megazero.train.step.timers import Timers
from megazero.zero import STAGES


def schedule_of(config: Config, microbatches: int | None = None) -> Schedule:
    """The configured pipeline schedule; `microbatches` may be left out if only the stages matter."""
    stages = config.parallel.pipeline_model_parallel_size
    return build_schedule(schedule_kind(config), stages, microbatches or 2 * stages, chunks_per_stage(config))


def programs_of(config: Config) -> Programs:
    """The programs of a training step and of an evaluation, for each number of micro-batches per replica."""
    row, overlap = STAGES[config.zero.stage], config.zero.overlap_grad_reduce
    stages, per_stage = config.parallel.pipeline_model_parallel_size, chunks_per_stage(config)
    kind = schedule_kind(config)

    @cache
    def train(microbatches: int) -> Program:
        return lower(
            build_schedule(kind, stages, microbatches, per_stage),
            gather=row.shard_params,
            reduce_every_microbatch=row.shard_grads,
            overlap_reduce=overlap,
        )

    @cache
    def evaluate(microbatches: int) -> Program:
        forward = build_schedule("forward", stages, microbatches, per_stage, v_shape=kind == "zb-v")
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
        sequence_parallel=parallel.sequence_parallel,
        token_dispatcher=parallel.moe_token_dispatcher_type,
    )
    return replace(placement, device=device)


Costs = Sequence[float]
"""The cost of each block, in model order: embedding, layers, head."""


def assign_layers(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> list[range]:
    """The layers of each chunk, according to `--pipeline-partition`.

    Raises:
        ConfigError: there are fewer layers than chunks, or the method's numbers do not fit.
    """
    method = config.parallel.pipeline_partition
    blocks = family_of(config.model).blocks(config, vocabulary.padded)
    weigh = _METHODS.get(method)
    costs = weigh(config, vocabulary, context) if weigh else [0.0, *[1.0] * (len(blocks) - 2), 0.0]
    return partition_layers(
        method,
        len(blocks) - 2,
        len(schedule_of(config).stage_of),
        embedding=costs[0],
        layers=costs[1:-1],
        head=costs[-1],
        types=[block.kind for block in blocks[1:-1]],
    )


def parameter_counts(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Costs:
    """Number of parameters in each block; a tied head counts, because its stage holds a copy."""
    build = _piece_builder(config, vocabulary, context, torch.device("meta"))
    pieces = map(build, range(config.model.num_layers + 2))
    return [float(sum(p.numel() for p in piece.parameters())) for piece in pieces]


def estimated_costs(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Costs:
    """FLOPs per token in each block; looking up an embedding takes none."""
    return [block.flops for block in family_of(config.model).blocks(config, vocabulary.padded)]


def measured_costs(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Costs:
    """Seconds that each block's forward and backward take for a micro-batch: best of three, slowest rank.

    Blocks of the same kind with equally many FLOPs and parameters are measured once.
    """
    family, shape = family_of(config.model), (config.batch.micro_batch_size, config.model.seq_length)
    arrays = family.random_arrays(np.random.default_rng(0), *shape, vocabulary.size)
    batch = family.collate(config, vocabulary.size, context.device, None)(arrays, tuple(range(shape[0])))
    blocks = family.blocks(config, vocabulary.padded)
    alike = list(zip(blocks, parameter_counts(config, vocabulary, context), strict=True))
    firsts = [alike.index(kind) for kind in alike]
    seconds = torch.zeros(len(blocks), dtype=torch.float64, device=context.device)
    build = _piece_builder(config, vocabulary, context, context.device)
    for i in sorted(set(firsts)):
        piece = build(i)
        initialize(piece, config.training.seed, context.place)
        hidden = torch.zeros(piece.hidden_shape(batch), dtype=piece.hidden_dtype, device=context.device)
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
        result, sums = chunk.run(batch, hidden, deferred=None)
        reduce(torch.add, [value.sum() for value in (result, *sums.values()) if value is not None]).backward()
    return timers.collect()["block"]


def _piece_builder(
    config: Config, vocabulary: Vocabulary, context: ParallelContext, device: torch.device
) -> Callable[[int], ModelChunk[MicroBatch]]:
    """Return a function that builds a block of the model, given its number, as a chunk of its own.

    A tied head gets its own weight, because its stage holds a copy.
    """
    family, count = family_of(config.model), config.model.num_layers
    vocab, placement = (
        (vocabulary.size, vocabulary.padded),
        placement_of(config.parallel, config.precision.dtype, context, device),
    )
    spans = [
        ChunkSpan(range(0), head=False),
        *(ChunkSpan(range(i, i + 1), embedding=False, head=False) for i in range(count)),
        ChunkSpan(range(0), embedding=False),
    ]
    return lambda number: family.chunk(config.model, vocab, placement, config.recompute, spans[number])


Chunks = dict[int, ModelChunk[MicroBatch]]
"""This rank's parts of the model, by their numbers along the model."""


def build_chunks(
    config: Config, vocabulary: Vocabulary, context: ParallelContext, device: torch.device | None = None
) -> Chunks:
    """This rank's parts of the model: shapes only, on the meta device, or the seed's weights on `device`.

    Raises:
        ConfigError: the layers cannot be assigned to the stages as configured.
    """
    family = family_of(config.model)
    placement = placement_of(config.parallel, config.precision.dtype, context, device or torch.device("meta"))
    stage_of = schedule_of(config).stage_of
    tied = family.ties(config.model)
    vocab = vocabulary.size, vocabulary.padded
    chunks: Chunks = {}
    for number, layers in enumerate(assign_layers(config, vocabulary, context)):
        if stage_of[number] != context.pp.rank:
            continue
        first, last = number == 0, number == len(stage_of) - 1
        span = ChunkSpan(layers, first, last, shared=first and tied and stage_of[0] != stage_of[-1])
        # In a V-shaped pipeline the first and the last chunk are on the same stage and share one weight.
        weight = chunks[0].tied_weight if last and not first and tied and 0 in chunks else None
        chunks[number] = family.chunk(config.model, vocab, placement, config.recompute, span, weight)
        if device is not None:
            initialize(chunks[number], config.training.seed, context.place)
    return chunks
