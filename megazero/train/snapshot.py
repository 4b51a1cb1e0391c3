"""Between a run and its checkpoints: what is saved, and what a resume checks and takes over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import (
    SliceReader,
    Snapshot,
    iteration_folder,
    latest_iteration,
    read_facts,
    save_checkpoint,
)
from megazero.config.tree import Config, RecomputeConfig
from megazero.data.tokenizers import Tokenizer
from megazero.errors import CheckpointError, ConfigError
from megazero.mpu import Launch, ParallelContext, join, spec_of
from megazero.optim import ScalerState
from megazero.train.engine import Engine
from megazero.train.model import Chunks, build_chunks, build_vocabulary, schedule_of
from megazero.train.state import TrainState


def save_state(config: Config, engine: Engine, context: ParallelContext, state: TrainState) -> None:
    """Write a checkpoint to `--save`. Shards are gathered bucket by bucket, to be written by one replica."""
    moments = not config.checkpoint.no_save_optim
    writes = context.replica.rank == 0
    tensors = {
        f"{spec.name}/{kind}": tensor.cpu() if tensor.is_cuda else tensor.clone()
        for spec, parts in engine.optimizer.full_state()
        for kind, tensor in parts.items()
        if writes and (moments or kind == "weight")
    }
    scaler = engine.scaler_state
    facts = {
        "config": config.model_dump(mode="json"),
        "state": vars(state),
        "scaler": vars(scaler) if moments else None,
        "updates": engine.optimizer.updates if moments else None,
        "stream_seed": config.training.seed,
    }
    save_checkpoint(config.checkpoint.save, state.iteration, Snapshot(tensors, facts), context)


# What decides the learning rate after a resume; a silent change of these would bend the schedule.
SCHEDULE_FIELDS = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_decay_tokens",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_tokens",
    "lr_warmup_fraction",
    "lr_warmup_init",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
)


def load_state(config: Config, engine: Engine, context: ParallelContext) -> tuple[TrainState, int]:
    """Resume from `--load`: where training stands, and the seed of the dropout streams.

    Raises:
        CheckpointError: the checkpoint is damaged, of another layout or model, or of another learning rate
            schedule without --override-opt_param-scheduler; or none is there and that was not allowed.
    """
    section = config.checkpoint
    fresh = TrainState(), config.training.seed
    if section.load is None:
        return fresh
    iteration = latest_iteration(section.load)
    if iteration is None:
        if section.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"`load` must hold a checkpoint, but {section.load} has none; check the path"
            )
        return fresh
    folder = iteration_folder(section.load, iteration)
    facts = read_facts(folder)
    with_moments = not (section.finetune or section.no_load_optim)
    if with_moments and facts["updates"] is None:
        raise CheckpointError(
            f"`{folder}` was saved without optimizer state; set --no-load-optim or --finetune"
        )
    if not section.finetune:
        _check_schedule(config, facts["config"], folder)
    optimizer = engine.optimizer
    kinds = ("weight", *optimizer.rule.state_names) if with_moments else ("weight",)
    shapes = {
        f"{spec.name}/{kind}": spec.local_shape(context.tp.size)
        for bucket in optimizer.buckets
        for spec in bucket.specs
        for kind in kinds
    }
    with SliceReader(folder, shapes, context) as tensors:
        optimizer.load(lambda spec, kind: tensors[f"{spec.name}/{kind}"], kinds)
    optimizer.publish()
    if with_moments:
        engine.optimizer.updates = facts["updates"]
        engine.scaler_state = ScalerState(**facts["scaler"])
    if section.finetune:
        return fresh
    return TrainState(**facts["state"]), fresh[1] if section.no_load_rng else facts["stream_seed"]


def _check_schedule(config: Config, saved: Mapping[str, Any], folder: Path) -> None:
    if config.checkpoint.override_opt_param_scheduler:
        return
    now, then = config.optimizer.model_dump(mode="json"), saved["optimizer"]
    changed = [
        f"{name}: {then.get(name)} -> {now[name]}" for name in SCHEDULE_FIELDS if then.get(name) != now[name]
    ]
    if changed:
        raise CheckpointError(
            f"`{folder}` was trained with another schedule ({'; '.join(changed)}); "
            f"set --override-opt_param-scheduler to use the new values"
        )


@dataclass(frozen=True)
class Loaded:
    """A trained model on this rank of the job.

    Attributes:
        context: this rank's place.
        chunks: its parts of the model.
        stage_of: chunk of the whole model -> the pipeline stage that holds it.
        tokenizer: that it was trained with.
    """

    context: ParallelContext
    chunks: Chunks
    stage_of: tuple[int, ...]
    tokenizer: Tokenizer


def load_for_inference(directory: str, launch: Launch) -> Loaded:
    """The newest model of a checkpoint folder, ready to generate, on this rank of the job.

    Raises:
        CheckpointError: there is none, or it was written by other tensor or pipeline parallel sizes.
        ConfigError: the model was trained without a tokenizer.
    """
    iteration = latest_iteration(directory)
    if iteration is None:
        raise CheckpointError(f"`load` must hold a checkpoint, but {directory} has none; check the path")
    folder = iteration_folder(directory, iteration)
    config = Config.model_validate(read_facts(folder)["config"])
    # A sequence under generation is one token long and cannot be cut over ranks.
    parallel = config.parallel.model_copy(update={"sequence_parallel": False})
    config = config.model_copy(update={"parallel": parallel, "recompute": RecomputeConfig()})
    vocabulary = build_vocabulary(config)
    if vocabulary.tokenizer is None:
        raise ConfigError(
            f"`tokenizer_type` must be known to generate text, but {folder} was trained without one"
        )
    context = join(config.parallel, launch)
    chunks = build_chunks(config, vocabulary, context, context.device)
    weights = {f"{spec_of(p).name}/weight": p for chunk in chunks.values() for p in chunk.parameters()}
    shapes = {key: tuple(p.shape) for key, p in weights.items()}
    with torch.no_grad(), SliceReader(folder, shapes, context) as tensors:
        for key, parameter in weights.items():
            parameter.copy_(tensors[key])
    return Loaded(context, chunks, schedule_of(config).stage_of, vocabulary.tokenizer)
