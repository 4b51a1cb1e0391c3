"""The assignment of layers to chunks of the pipeline, and the cost of each block of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from types import MappingProxyType

import numpy as np
import torch

from megazero.config.tree import Config
from megazero.layers import initialize
from megazero.models import MicroBatch, ModelChunk, Part, Slice
from megazero.mpu import ParallelContext
from megazero.pipeline import partition_blocks
from megazero.train.families import family_of
from megazero.train.placement import placement_of
from megazero.train.programs import schedule_of
from megazero.train.timers import Timers
from megazero.train.vocabulary import Vocabulary

Costs = Sequence[float]
"""The cost of each block, in model order."""


def assign_parts(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> list[tuple[Part, ...]]:
    """The parts of the model in each chunk, according to `--pipeline-partition`.

    Raises:
        ConfigError: there are fewer layers than chunks, or the method's numbers do not fit.
    """
    method = config.parallel.pipeline_partition
    blocks = family_of(config.model).blocks(config, vocabulary.padded)
    weigh = _METHODS.get(method)
    costs = weigh(config, vocabulary, context) if weigh else [1.0] * len(blocks)
    types = [block.kind if isinstance(block.part, int) else None for block in blocks]
    chunks = partition_blocks(method, len(schedule_of(config).stage_of), costs=costs, types=types)
    return [tuple(blocks[number].part for number in numbers) for numbers in chunks]


def parameter_counts(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Costs:
    """Number of parameters in each block; a tied head counts, because its stage holds a copy."""
    build = _piece_builder(config, vocabulary, context, torch.device("meta"))
    pieces = [build(block.part) for block in family_of(config.model).blocks(config, vocabulary.padded)]
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
    counts = parameter_counts(config, vocabulary, context)
    alike = [(block.kind, block.flops, count) for block, count in zip(blocks, counts, strict=True)]
    firsts = [alike.index(kind) for kind in alike]
    seconds = torch.zeros(len(blocks), dtype=torch.float64, device=context.device)
    build = _piece_builder(config, vocabulary, context, context.device)
    for i in sorted(set(firsts)):
        piece = build(blocks[i].part)
        initialize(piece, config.training.seed, context.place)
        hidden = piece.takes(batch).empty(context.device).zero_()
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
    """Return a function that builds a part of the model as a chunk of its own.

    A tied head gets its own weight, because its stage holds a copy.
    """
    placement = placement_of(config, context, device)
    whole = Slice(config.model, (vocabulary.size, vocabulary.padded), placement, config.recompute)
    return lambda part: family_of(config.model).chunk(replace(whole, parts=(part,)))
