"""megazero on the same shape: through its own model, buckets and engine, as pretrain_gpt.py runs it."""

from __future__ import annotations

from datetime import timedelta

import torch

from benchmarks.contenders import Shape
from megazero.config.tree import (
    BatchConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megazero.models import Batch
from megazero.mpu import ProcessGrid, make_context
from megazero.mpu.torch_group import open_group
from megazero.train.allocator import keep_freed_memory
from megazero.train.assemble import Vocabulary, build_engine, build_model
from megazero.train.state import TrainState
from megazero.train.timers import Timers


def build(shape: Shape, rank: int, world_size: int, tp: int = 1):
    keep_freed_memory()
    config = Config(
        model=ModelConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            seq_length=shape.sequence,
            vocab_size=shape.vocab,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        parallel=ParallelConfig(tensor_model_parallel_size=tp),
        batch=BatchConfig(
            micro_batch_size=shape.micro_batch,
            global_batch_size=shape.micro_batch * shape.accumulations * (world_size // tp),
        ),
        optimizer=OptimizerConfig(lr=1e-4, adam_beta2=0.95, weight_decay=0.1, lr_decay_style="constant"),
        precision=PrecisionConfig(dtype=shape.dtype),
        training=TrainingConfig(train_iters=1000),
    )
    device = torch.device(shape.device, rank) if shape.device == "cuda" else torch.device("cpu")
    context = make_context(
        ProcessGrid.factor(world_size, tp=tp),
        rank,
        device,
        lambda name, ranks: open_group(name, rank, ranks, timedelta(minutes=5)),
    )
    vocabulary = Vocabulary(shape.vocab, shape.vocab, None, None)
    engine = build_engine(config, build_model(config, vocabulary, context), context)
    batches = [Batch(tokens, labels) for tokens, labels in shape.batches(context.data.rank)]
    tokens = shape.tokens_per_step * context.data.size
    timers, state = Timers(), TrainState()

    def step() -> float:
        return engine.train_step(batches, tokens, state.progress, timers).loss

    return step


def build_tp2(shape: Shape, rank: int, world_size: int):
    return build(shape, rank, world_size, tp=2)
