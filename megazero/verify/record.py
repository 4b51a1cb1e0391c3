"""Train a few steps under a configuration and record everything that law 1 is about.

Law 1: any layout gives the single process's loss, gradient norm, every gathered gradient and every weight
after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch import Tensor

from megazero.config.derive import padded_vocab_size
from megazero.config.steps import Step
from megazero.config.training_plan import TrainingPlan, training_plan_of
from megazero.config.tree.config import Config
from megazero.models.batch import Collate, MicroBatch
from megazero.mpu.context import ParallelContext
from megazero.mpu.param_spec import ParamSpec
from megazero.train.build import build_model
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.step.engine import Engine
from megazero.train.step.feed import crop
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.sampling import drawn_micro_batches, made_up_sampler, random_documents, vocabulary_size

STEPS = 5
_STREAM_SEED = 3


@dataclass(frozen=True)
class Record:
    """The results of each step on one rank: whole tensors by the names of its stage's parameters.

    Losses are by label, such as ``lm loss``. A copy of a tied parameter on another stage is listed as
    ``copy of NAME``.
    """

    losses: list[dict[str, float | None]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def record_training(config: Config, context: ParallelContext, steps: int = STEPS) -> Record:
    """Record `steps` steps on this rank, on random tokens with uneven loss masks."""
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
    """Build the engine of a configuration that gives the vocabulary size."""
    size = vocabulary_size(config)
    padded = padded_vocab_size(size, config.model, context.tp.size)
    vocabulary = Vocabulary(size, padded, None, None)
    return build_model(vocabulary, context, config, training_plan)


def micro_batches(config: Config, context: ParallelContext, step: Step) -> list[MicroBatch]:
    """This rank's micro-batches for a step, determined by the step's number and places in the global batch.

    About 1 / (1 + i) of the positions of sample i count.
    """
    number, total, size = step.before.iteration, step.batch_size, config.batch.micro_batch_size
    family = family_of(config.model)
    rng = np.random.default_rng(100 + number)
    # A step with several rows per sample cuts them from whole samples, as in a training.
    length = step.sequence_length if step.rows == 1 else config.model.seq_length
    arrays = family.samples.random_arrays(rng, total, length, vocabulary_size(config))
    arrays |= random_documents(config, number, (total, length))
    collate = collate_of(config, context)
    batches = []
    for first in range(context.data.rank * size, total, context.data.size * size):
        rows = slice(first, first + size)
        samples = tuple(number * total + i for i in range(first, first + size))
        mine = {name: array[rows] for name, array in arrays.items()}
        batches.append(collate(*crop(mine, samples, step.sequence_length, step.rows)))
    return batches


def collate_of(config: Config, context: ParallelContext) -> Collate[MicroBatch]:
    """The function that makes a micro-batch of arrays."""
    return family_of(config.model).samples.collate(config, vocabulary_size(config), context, _STREAM_SEED)


def _whole(
    parts: Iterator[tuple[ParamSpec, Tensor]], context: ParallelContext
) -> Iterator[tuple[str, Tensor]]:
    for spec, tensor in parts:
        name = spec.name if spec.tied_with is None else f"copy of {spec.tied_with}"
        yield name, spec.unshard(tensor.float(), context.groups).clone()
