"""megazero on the same samples, through its own model, batches and engine, as pretrain_bert.py runs it."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from benchmarks.contenders.bert import BertShape
from benchmarks.contenders.ours import join_context, make_config, vocabulary_of
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.mpu.context import solo_context
from megazero.mpu.malloc import keep_freed_memory
from megazero.train.build import build_engine
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.families import family_of
from megazero.train.step.timers import Timers


def build(shape: BertShape, rank: int, world_size: int, pack: bool = False, trim: bool = True):
    """`trim` leaves out the columns that only pad, as training does."""
    keep_freed_memory()
    config = make_config(shape, world_size, ParallelConfig(), ZeroConfig())
    dropout = {"hidden_dropout": shape.dropout, "attention_dropout": shape.dropout}
    model = config.model.model_copy(update={"family": "bert", **dropout})
    data = config.data.model_copy(update={"bert_pack": pack})
    config = config.model_copy(update={"model": model, "data": data})
    context = join_context(shape, rank, world_size, config.parallel)
    vocabulary = vocabulary_of(shape)
    chunks = build_chunks(config, vocabulary, context)
    engine = build_engine(config, training_plan_of(config, context.data.size), chunks, context)
    collate = family_of(config.model).samples.collate(config, shape.vocab, solo_context(shape.device), 1234)
    if not trim:
        collate = replace(collate, multiple=shape.sequence)
    numbers = count(rank, world_size)  # of the samples, in the training order
    steps = shape.steps(rank, lambda arrays: collate(arrays, tuple(next(numbers) for _ in arrays["lengths"])))
    timers = Timers()

    def step() -> float:
        loss = engine.train_step(next(steps), Progress(), timers).losses.total
        timers.collect()
        return loss

    return step
