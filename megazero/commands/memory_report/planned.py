"""The memory of a training that is not run: a rank of each pipeline stage, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from megazero.commands.memory_report.table import RankMemory
from megazero.config.derive import replicas_per_node
from megazero.config.steps import Progress
from megazero.config.training_plan import TrainingPlan, training_plan_of
from megazero.config.tree.config import Config
from megazero.models.batch import MicroBatch
from megazero.mpu.context import ParallelContext
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import grid_of
from megazero.mpu.streams import STILL
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.train.build import build_model
from megazero.train.observe.memory import MemoryMeter
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.step.feed import cut
from megazero.train.step.timers import Timers


def planned_memory(config: Config, ranks: int) -> list[RankMemory]:
    """The memory of the first rank of each stage, which stands for all ranks of its stage.

    Sizes between steps are exact, unless experts are spread unevenly. Activations are those of a first step
    that runs on tensors without content, with what kernels make for their results and for backward.

    Args:
        config: the training's configuration.
        ranks: the number of its ranks.

    Raises:
        ConfigError: the model cannot be built on so many ranks.
    """
    grid, vocabulary = grid_of(config.parallel, ranks), build_vocabulary(config)
    training_plan = training_plan_of(config, grid.dp)
    stages: dict[int, list[int]] = {}
    for rank in range(ranks):
        stages.setdefault(grid.place(rank).index("pp"), []).append(rank)
    return [
        RankMemory(tuple(members), _of_rank(config, training_plan, vocabulary, grid, members[0]))
        for members in stages.values()
    ]


def _of_rank(
    config: Config, training_plan: TrainingPlan, vocabulary: Vocabulary, grid: ProcessGrid, rank: int
) -> Mapping[str, Mapping[str, int]]:
    context = recording_context(grid, rank, TrafficLog(), node_size=replicas_per_node(config.zero))
    if is_apart(config):
        context = replace(context, streams=STILL)  # so offload takes buffers
    engine = build_model(vocabulary, context, config, training_plan)
    batches = _batches(config, training_plan, vocabulary, context)
    meter = MemoryMeter.of(engine)
    with meter.over_a_step():
        engine.train_step(batches, Progress(), Timers())
    return meter.sizes()


def is_apart(config: Config) -> bool:
    """Whether the training's devices have memory apart from the host's."""
    wanted = config.parallel.device
    return wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())


def _batches(
    config: Config, training_plan: TrainingPlan, vocabulary: Vocabulary, context: ParallelContext
) -> list[MicroBatch]:
    """This rank's micro-batches of the first step, of random samples."""
    family, step, size = family_of(config.model), training_plan.at(Progress()), config.batch.micro_batch_size
    length = step.sequence_length if step.rows == 1 else config.model.seq_length
    collate = family.collate(config, vocabulary.size, context, config.training.seed)
    rng, batches = np.random.default_rng(0), []
    for first in range(0, size * step.micro_batches, size):
        arrays = family.random_arrays(rng, size, length, vocabulary.size)
        samples = tuple(range(first, first + size))
        batches.append(collate(*cut(arrays, samples, step.sequence_length, step.rows)))
    return batches
