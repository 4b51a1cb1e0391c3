"""Train a few steps under a configuration and record what law 1 compares.

Law 1: in each step, any layout gives the single process's loss, gradient norm, gradients and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch import Tensor

from megazero.config.derive import padded_vocab_size
from megazero.config.steps import Progress, Step
from megazero.config.training_plan import TrainingPlan, training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.config.tree.data_sampling import DataSamplingConfig
from megazero.config.tree.distillation import DistillationConfig
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.models.batch import Collate, MicroBatch
from megazero.mpu.context import ParallelContext, solo_context
from megazero.mpu.param_spec import ParamSpec
from megazero.train.build import build_model
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.engine import Engine
from megazero.train.step.feed import crop
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.sampling import (
    drawn_length,
    drawn_micro_batches,
    made_up_sampler,
    random_documents,
    vocabulary_size,
)

STEPS = 5
_STREAM_SEED = 3


@dataclass(frozen=True)
class Record:
    """The results of each step on one rank.

    Losses are keyed by label, such as ``lm loss``. Gradients and weights are whole (gathered) tensors, keyed
    by the names of the stage's parameters; a tied parameter's copy on another stage is ``copy of NAME``.
    """

    losses: list[dict[str, float | None]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def record_training(config: Config, context: ParallelContext, steps: int = STEPS) -> Record:
    """Record `steps` steps on this rank, on random tokens and loss masks that differ between samples."""
    training_plan = training_plan_of(config, context.data.size)
    engine = verification_engine(config, training_plan, context)
    sampler = made_up_sampler(config, training_plan.steps, context)
    if sampler is None:
        return record_steps(engine, training_plan, steps, partial(micro_batches, config, context))
    collate = collate_of(config, context)
    return record_steps(engine, training_plan, steps, partial(drawn_micro_batches, config, sampler, collate))


def record_steps(
    engine: Engine,
    training_plan: TrainingPlan,
    steps: int,
    batches_of: Callable[[Step], Sequence[MicroBatch]],
) -> Record:
    """Train `engine` for `steps` steps; `batches_of` returns this rank's micro-batches for a step."""
    context = engine.context
    record, state, timers = Record(), TrainState(), Timers()
    for _ in range(steps):
        step = training_plan.at(state.progress)
        result = engine.train_step(batches_of(step), state.progress, timers)
        state = state.after(step, result.skipped)
        record.losses.append(result.losses.labelled())
        record.grad_norms.append(result.grad_norm)
        record.gradients.append(dict(_whole(engine.optimizer.full_gradients(), context)))
        weights = ((spec, state["weight"]) for spec, state in engine.optimizer.full_state(("weight",)))
        record.weights.append(dict(_whole(weights, context)))
    return record


def verification_engine(config: Config, training_plan: TrainingPlan, context: ParallelContext) -> Engine:
    """Build the engine of a configuration with a vocabulary size, without a tokenizer."""
    size = vocabulary_size(config)
    padded = padded_vocab_size(size, config.model, context.tp.size)
    vocabulary = Vocabulary(size, padded, None, None)
    return build_model(vocabulary, context, config, training_plan)


def with_teacher(config: Config, folder: str) -> Config:
    """Save a teacher in `folder`, and return the student's configuration with that teacher.

    Raises:
        CheckpointError: the teacher cannot be saved there.
    """
    model = config.model.model_copy(update={"num_layers": 2 * config.model.num_layers})
    changes = {
        "model": model,
        "parallel": ParallelConfig(),
        "zero": ZeroConfig(),
        "recompute": RecomputeConfig(),
        "training": config.training.model_copy(update={"seed": config.training.seed + 1}),
        "checkpoint": CheckpointConfig(save=folder),
        "distillation": DistillationConfig(),
        "curriculum": CurriculumConfig(),
        "data_sampling": DataSamplingConfig(),
    }
    teacher, context = config.model_copy(update=changes), solo_context()
    training_plan = training_plan_of(teacher, 1)
    engine = verification_engine(teacher, training_plan, context)
    snapshots = Snapshots(
        teacher, training_plan, engine, context, vocabulary_size(teacher), teacher.training.seed
    )
    try:
        snapshots.save(TrainState(Progress(1)))
    finally:
        snapshots.saver.close()
    distillation = {
        "load_teacher": folder,
        **dict.fromkeys(("num_layers_teacher", "hidden_size_teacher", "num_attention_heads_teacher")),
        "num_experts_teacher": (),
    }
    return config.model_copy(update={"distillation": config.distillation.model_copy(update=distillation)})


def micro_batches(config: Config, context: ParallelContext, step: Step) -> list[MicroBatch]:
    """Make this rank's random micro-batches for a step.

    They follow from the step's number and the samples' places in the global batch alone, so all layouts train
    on the same samples. About 1 / (1 + i) of the positions of sample i count in the loss.
    """
    number, total, size = step.before.iteration, step.batch_size, config.batch.micro_batch_size
    family = family_of(config.model)
    rng = np.random.default_rng(100 + number)
    length = drawn_length(config, step)
    arrays = family.samples.random_arrays(rng, total, length, vocabulary_size(config))
    arrays |= random_documents(config, number, (total, length))
    collate = collate_of(config, context)
    batches = []
    for first in range(context.data.rank * size, total, context.data.size * size):
        rows = slice(first, first + size)
        samples = tuple(number * total + i for i in range(first, first + size))
        local = {name: array[rows] for name, array in arrays.items()}
        batches.append(collate(*crop(local, samples, step.sequence_length, step.rows)))
    return batches


def collate_of(config: Config, context: ParallelContext) -> Collate[MicroBatch]:
    """The function that makes a micro-batch from arrays of samples."""
    return family_of(config.model).samples.collate(config, vocabulary_size(config), context, _STREAM_SEED)


def _whole(
    parts: Iterator[tuple[ParamSpec, Tensor]], context: ParallelContext
) -> Iterator[tuple[str, Tensor]]:
    for spec, tensor in parts:
        name = spec.name if spec.tied_with is None else f"copy of {spec.tied_with}"
        yield name, spec.unshard(tensor.float(), context.groups).clone()
