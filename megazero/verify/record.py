"""Train a few steps under a configuration and write down everything that the law speaks of.

Law 1: any layout gives the single process's loss, gradient norm, every gathered gradient and every weight
after each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from megazero.config.derive import global_batch_size, padded_vocab_size
from megazero.config.tree import Config
from megazero.models import Batch
from megazero.mpu import ParallelContext, ParamSpec, SampleStreams
from megazero.train.assemble import build_engine
from megazero.train.engine import Engine
from megazero.train.model import Vocabulary, build_chunks
from megazero.train.state import TrainState
from megazero.train.timers import Timers

STEPS = 5


@dataclass(frozen=True)
class Record:
    """What one rank saw of a training, per step: tensors whole, by the names of the parameters on its stage.

    A copy of a tied parameter on another stage stands under ``copy of NAME``.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def record_training(config: Config, context: ParallelContext, steps: int = STEPS) -> Record:
    """Train `steps` steps on this rank, on random tokens with uneven loss masks."""
    engine = verification_engine(config, context)
    record, state, timers = Record(), TrainState(), Timers()
    size = global_batch_size(config, context.data.size)
    tokens = size * config.model.seq_length
    for step in range(steps):
        batches = micro_batches(config, context, step)
        result = engine.train_step(batches, tokens, state.progress, timers)
        state = state.after(size, tokens, result.skipped)
        record.losses.append(result.loss)
        record.grad_norms.append(result.grad_norm)
        record.gradients.append(dict(_whole(engine.optimizer.full_gradients(), context)))
        weights = ((spec, state["weight"]) for spec, state in engine.optimizer.full_state())
        record.weights.append(dict(_whole(weights, context)))
    return record


def verification_engine(config: Config, context: ParallelContext) -> Engine:
    """The engine of a configuration that names its vocabulary's size."""
    size = config.model.vocab_size
    padded = padded_vocab_size(size, config.model.make_vocab_size_divisible_by, context.tp.size)
    vocabulary = Vocabulary(size, padded, None, None)
    return build_engine(config, build_chunks(config, vocabulary, context), context)


def micro_batches(config: Config, context: ParallelContext, step: int) -> list[Batch]:
    """This rank's micro-batches of a step: a function of the step and places in the global batch.

    Sample i counts about 1 / (1 + i) of its positions.
    """
    rng = np.random.default_rng(100 + step)
    total, size = global_batch_size(config, context.data.size), config.batch.micro_batch_size
    text = rng.integers(0, config.model.vocab_size, (total, config.model.seq_length + 1))
    share = 1.0 / (1 + np.arange(total))[:, None]
    mask = (rng.random((total, config.model.seq_length)) < share).astype(np.float32)
    batches = []
    for first in range(context.data.rank * size, total, context.data.size * size):
        rows = slice(first, first + size)
        arrays = {"tokens": text[rows, :-1], "labels": text[rows, 1:], "loss_mask": mask[rows]}
        streams = SampleStreams(3, tuple(step * total + i for i in range(first, first + size)))
        arrays = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
        batches.append(Batch.from_arrays(arrays, context.device, streams))
    return batches


def _whole(
    parts: Iterator[tuple[ParamSpec, Tensor]], context: ParallelContext
) -> Iterator[tuple[str, Tensor]]:
    for spec, tensor in parts:
        name = spec.name if spec.tied_with is None else f"copy of {spec.tied_with}"
        yield name, spec.unshard(tensor.float(), context.tp).clone()
