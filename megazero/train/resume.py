"""Continuing a run: which checkpoint, whether it fits, and what is taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import (
    Box,
    CheckpointReader,
    Key,
    Part,
    Source,
    Verify,
    candidates,
    parts_to_read,
    state_keys,
    together,
)
from megazero.config.tree import Config, ModelConfig
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.mpu import ParallelContext, gather_values
from megazero.optim import ScalerState
from megazero.train.engine import Engine
from megazero.train.random_state import random_state, set_random_state
from megazero.train.snapshot import RANDOM
from megazero.train.state import TrainState
from megazero.zero import Optimizer

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
# Settings of the model under which the same weights mean the same function.
FREE_MODEL_FIELDS = frozenset(
    {
        "seq_length",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "vocab_size",  # checked as the vocabulary's own size
        "make_vocab_size_divisible_by",
    }
)
# Their changes say nothing about the training.
_SILENT_SECTIONS = ("checkpoint", "logging")
_SHOWN = 10


@dataclass(frozen=True)
class Resumed:
    """Where a run continues.

    Attributes:
        engine: with the state of the checkpoint, or new.
        state: where training stands.
        stream_seed: of the dropout streams.
        config: of the run; its global batch is the checkpoint's where none was asked for.
        remarks: what a person should know of it.
    """

    engine: Engine
    state: TrainState
    stream_seed: int
    config: Config
    remarks: tuple[str, ...] = ()


def resume(
    config: Config,
    context: ParallelContext,
    vocab_size: int,
    build: Callable[[Config], Engine],
    foreign: Callable[[str], Source],
) -> Resumed:
    """Continue from the best checkpoint in `--load`, or start; every rank calls this.

    A damaged checkpoint is passed over for the newest whole one, by all ranks, whichever of them finds out.

    Args:
        config: of the run.
        context: all ranks.
        vocab_size: entries of the vocabulary, without padding.
        build: makes an engine with new weights.
        foreign: opens what `--load-hf` names.

    Raises:
        CheckpointError: on every rank: no checkpoint is whole, it is of another model or of another learning
            rate schedule without --override-opt_param-scheduler; or none is there and that was not allowed.
    """
    section = config.checkpoint
    found = candidates(section.load, section.ckpt_step) if section.load else None
    if found is None or not (found.folders or found.remarks):
        if section.load and section.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"`load` must hold a checkpoint, but {section.load} has none; check the path"
            )
        return _start(config, context, build, foreign)
    remarks = list(found.remarks)
    engine, built = None, None
    for folder in found.folders:
        try:
            reader = _open(folder, config, context)
            kept, changes = _fit(config, reader, vocab_size)
            if engine is None or kept != built:
                engine, built = build(kept), kept
            state, seed = _load(kept, engine, context, reader)
        except DamagedCheckpointError as error:
            remarks.append(f"passed over {folder}: {error}")
            continue
        return Resumed(engine, state, seed, kept, (*remarks, f"loaded {folder}", *changes))
    raise DamagedCheckpointError(
        f"`load` must hold a whole checkpoint, but {section.load} has none: " + "; ".join(remarks)
    )


def _start(
    config: Config,
    context: ParallelContext,
    build: Callable[[Config], Engine],
    foreign: Callable[[str], Source],
) -> Resumed:
    engine = build(config)
    seed, path = config.training.seed, config.checkpoint.load_hf
    if path is None:
        return Resumed(engine, TrainState(), seed, config)

    def read() -> None:
        source = foreign(path)
        parts = parts_to_read(engine.optimizer, context, moments=False)
        check_tensors(source, parts, path)
        source.read(parts)

    together(context, read, f"load {path}")
    engine.optimizer.publish()
    return Resumed(engine, TrainState(), seed, config, (f"took the weights from {path}",))


def _open(folder: Path, config: Config, context: ParallelContext) -> CheckpointReader:
    readers: list[CheckpointReader] = []

    def work() -> None:
        readers.append(CheckpointReader(folder, verify=Verify(config.checkpoint.verify_checkpoint)))

    together(context, work, f"open {folder}")
    return readers[0]


def _fit(config: Config, reader: CheckpointReader, vocab_size: int) -> tuple[Config, list[str]]:
    """The configuration to continue with, and its differences from the saved one.

    Raises:
        CheckpointError: the checkpoint is of another model, or of another schedule.
    """
    facts, section = reader.facts, config.checkpoint
    _check_model(config.model, vocab_size, facts, reader.folder)
    saved = facts.get("config")
    if saved is None or section.finetune:  # converted weights, or counting anew
        return config, []
    _check_schedule(config, saved, reader.folder)
    batch = facts["global_batch_size"]
    kept = config
    if config.batch.global_batch_size is None:
        kept = config.model_copy(
            update={"batch": config.batch.model_copy(update={"global_batch_size": batch})}
        )
    changes = [
        f"{where}: {before} -> {now}"
        for where, before, now in _differences(saved, config.model_dump(mode="json"))
    ]
    return kept, ["changed since the checkpoint: " + "; ".join(changes)] if changes else []


def _load(
    config: Config, engine: Engine, context: ParallelContext, reader: CheckpointReader
) -> tuple[TrainState, int]:
    section, facts, optimizer = config.checkpoint, reader.facts, engine.optimizer
    progress = not section.finetune and facts.get("state") is not None
    moments = not (section.finetune or section.no_load_optim) and facts.get("kind") == "pretraining"
    if moments and facts["updates"] is None:
        raise CheckpointError(
            f"`{reader.folder}` was saved without optimizer state; set --no-load-optim or --finetune"
        )
    parts = parts_to_read(optimizer, context, moments=moments)
    unused = _unused(reader, optimizer, context) if moments else []
    generators = random_state(context.device)
    rows = _random_rows(reader, context, generators) if progress and not section.no_load_rng else []

    def read() -> None:
        check_tensors(reader, parts, reader.folder, unused)
        reader.read([*parts, *rows])

    together(context, read, f"load {reader.folder}")
    optimizer.publish()
    if moments:
        optimizer.updates = facts["updates"]
        engine.scaler_state = ScalerState(**facts["scaler"])
    if rows:
        set_random_state(generators, context.device)
    state = TrainState(**facts["state"]) if progress else TrainState()
    seed = facts["stream_seed"] if progress and not section.no_load_rng else config.training.seed
    return state, seed


def _random_rows(
    reader: CheckpointReader, context: ParallelContext, generators: Mapping[str, torch.Tensor]
) -> list[Part]:
    """What sets this rank's generators, if the checkpoint is of as many ranks and has them."""
    rows = []
    for name, state in generators.items():
        key, shape = Key(name, RANDOM), (context.world_size, *state.shape)
        if reader.shapes.get(key) != shape:
            return []
        row = Box((context.rank, *[0] * state.dim()), (1, *state.shape))
        rows.append(Part(key, shape, row, state.unsqueeze(0)))
    return rows


def _unused(reader: CheckpointReader, optimizer: Optimizer, context: ParallelContext) -> list[str]:
    """What the checkpoint holds of weights and optimizer state, and no rank has a place for."""
    mine = sorted(str(key) for key in state_keys(optimizer))
    asked = {name for names in gather_values(context.model, mine, context.device) for name in names}
    return [str(key) for key in reader.shapes if key.kind != RANDOM and str(key) not in asked]


def check_tensors(source: Source, parts: Iterable[Part], where: object, unused: Iterable[str] = ()) -> None:
    """Refuse what is missing, of another shape, or left over, by name."""
    wrong = []
    for key, shape in {part.key: tuple(part.shape) for part in parts}.items():
        if key not in source.shapes:
            wrong.append(f"{key} is missing")
        elif tuple(source.shapes[key]) != shape:
            wrong.append(f"{key} has shape {list(source.shapes[key])}, not {list(shape)}")
    wrong += [f"{name} is not used" for name in unused]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"`{where}` does not fit this model: " + "; ".join(wrong[:_SHOWN]) + more)


def _check_model(model: ModelConfig, vocab_size: int, facts: Mapping[str, Any], folder: Path) -> None:
    saved = (facts.get("config") or {}).get("model") or facts.get("model")
    if saved is None:
        raise CheckpointError(f"`{folder}` must say which model it is of, but does not; convert it anew")
    now = model.model_dump(mode="json")
    # A field of another version of the code may be on one side only; its tensors are compared by name.
    shared = [name for name in now if name in saved and name not in FREE_MODEL_FIELDS]
    filled = ModelConfig.model_validate({name: saved[name] for name in now if name in saved})
    derived = {"ffn_hidden_size": "ffn_size", "num_query_groups": "kv_heads", "kv_channels": "head_dim"}
    derived["max_position_embeddings"] = "positions"
    wrong = []
    for name in shared:
        get = derived.get(name, name)
        before, after = getattr(filled, get), getattr(model, get)
        if before != after:
            wrong.append(f"{name} {before} (now {after})")
    if facts["vocab_size"] != vocab_size:
        wrong.append(f"vocab_size {facts['vocab_size']} (now {vocab_size})")
    if wrong:
        raise CheckpointError(f"`{folder}` must be of this model, but has {', '.join(wrong)}")


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


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(setting, saved value, value now) of all that differ and matter to the training."""
    found = []
    for section in sorted({*saved, *now}):
        if section in _SILENT_SECTIONS:
            continue
        before, after = saved.get(section) or {}, now.get(section) or {}
        found += [
            (f"{section}.{name}", before.get(name), after.get(name))
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        ]
    return found
