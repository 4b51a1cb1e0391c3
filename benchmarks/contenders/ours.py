"""megazero on the same shape, through its own model, buckets and engine, as pretrain_gpt.py runs it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.contenders import ActionTime, Shape
from megazero.config.rules.table import check
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.acceleration import AccelerationConfig
from megazero.config.tree.config import Config
from megazero.config.tree.data import DataConfig
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.offload import OffloadConfig
from megazero.config.tree.optimizer import OptimizerConfig
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.precision import PrecisionConfig
from megazero.config.tree.training import BatchConfig, TrainingConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.errors import ConfigError
from megazero.models.batch import Batch
from megazero.models.targets import Targets
from megazero.mpu.context import ParallelContext, solo_context
from megazero.mpu.launch import Launch, open_context
from megazero.mpu.malloc import keep_freed_memory
from megazero.pipeline.actions import Action
from megazero.train.build import build_engine
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.step.engine import Engine
from megazero.train.step.timers import Timers


def model_config(shape: Shape) -> ModelConfig:
    """The shape of the plain GPT."""
    return ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        seq_length=shape.sequence,
        vocab_size=shape.vocab,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def make_config(
    shape: Shape,
    world_size: int,
    parallel: ParallelConfig,
    zero: ZeroConfig,
    offload: OffloadConfig | None = None,
) -> Config:
    """The configuration of one contender.

    Raises:
        ConfigError: the parts do not go together.
    """
    replicas = world_size // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    config = Config(
        model=model_config(shape),
        parallel=parallel,
        zero=zero,
        offload=offload or OffloadConfig(),
        batch=BatchConfig(
            micro_batch_size=shape.micro_batch,
            global_batch_size=shape.micro_batch * shape.accumulations * replicas,
        ),
        optimizer=OptimizerConfig(lr=1e-4, adam_beta2=0.95, weight_decay=0.1, lr_decay_style="constant"),
        precision=PrecisionConfig(dtype=shape.dtype),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(train_iters=1000),
    )
    wrong = check(config, world_size)
    if wrong:
        raise ConfigError(wrong)
    return config


def vocabulary_of(shape: Shape) -> Vocabulary:
    """All entries of the plain GPT, without padding."""
    return Vocabulary(shape.vocab, shape.vocab, None, None)


def join_context(shape: Shape, rank: int, world_size: int, config: ParallelConfig) -> ParallelContext:
    """This rank's place in a job whose process group exists."""
    device = torch.device(shape.device, rank) if shape.device == "cuda" else torch.device("cpu")
    if world_size == 1:
        return solo_context(device)
    return open_context(config, Launch(rank, world_size, rank), device)


class Trainer:
    """The engine's training step on the micro-batches of a rank."""

    def __init__(self, shape: Shape, engine: Engine, context: ParallelContext):
        self.engine = engine
        self.batches = [Batch(tokens, Targets(labels)) for tokens, labels in shape.batches(context.data.rank)]
        self.timers = Timers()
        self.stage = context.pp.rank
        self.times: list[ActionTime] = []
        if context.pp.size > 1:
            engine.executor.observer = self.observe

    def observe(self, action: Action, seconds: float) -> None:
        """Called by the executor for each action."""
        if action.op.computes:
            self.times.append(ActionTime(self.stage, action.op.value, action.chunk, seconds))

    def __call__(self) -> float:
        loss = self.engine.train_step(self.batches, Progress(), self.timers).losses.total
        self.times.append(ActionTime(self.stage, "U", 0, self.timers.collect()["optimizer"]))
        return loss

    def take_action_times(self) -> list[ActionTime]:
        """The times since they were last taken."""
        taken, self.times = self.times, []
        return taken


def build(
    shape: Shape,
    rank: int,
    world_size: int,
    tp: int = 1,
    pp: int = 1,
    parallel: Mapping[str, object] | None = None,
    zero: Mapping[str, object] | None = None,
    offload: Mapping[str, object] | None = None,
    compile: bool = False,
):
    """`parallel`, `zero` and `offload` are further fields of these sections of the configuration."""
    keep_freed_memory()
    layout = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **(parallel or {})}
    sections = ParallelConfig(**layout), ZeroConfig(**(zero or {})), OffloadConfig(**(offload or {}))
    config = make_config(shape, world_size, *sections)
    config = config.model_copy(update={"acceleration": AccelerationConfig(compile=compile)})
    context = join_context(shape, rank, world_size, config.parallel)
    training_plan = training_plan_of(config, context.data.size)
    engine = build_engine(config, training_plan, build_chunks(config, vocabulary_of(shape), context), context)
    return Trainer(shape, engine, context)
