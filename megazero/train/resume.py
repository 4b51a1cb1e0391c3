"""Continuing a run: which checkpoint, whether it fits, and what is taken over."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import (
    RANDOM,
    WEIGHT,
    Box,
    Candidates,
    CheckpointReader,
    Key,
    Part,
    Source,
    Verify,
    candidates,
    misfits,
    parts_to_read,
    state_keys,
    together,
)
from megazero.config.derive import model_differences
from megazero.config.rules import check
from megazero.config.tree import Config, ModelConfig
from megazero.config.tree_output import CheckpointConfig
from megazero.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megazero.mpu import ParallelContext, gather_values
from megazero.optim import ScalerState
from megazero.train.engine import Engine
from megazero.train.facts import RunFacts, SavedModel, saved_model, saved_run
from megazero.train.random_state import random_state, set_random_state
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
    foreign: Callable[[str], AbstractContextManager[Source]],
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
        ConfigError: the checkpoint's global batch cannot be dealt to these ranks, and no other was asked for.
        CheckpointError: on every rank: no checkpoint is whole, it is of another model or of another learning
            rate schedule without --override-opt_param-scheduler; or none is there and that was not allowed.
    """
    section = config.checkpoint
    found = _candidates(section, context) if section.load else None
    if found is None or not (found.folders or found.remarks):
        if section.load and section.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"`load` must hold a checkpoint, but {section.load} has none; check the path"
            )
        return _start(config, context, build, foreign)
    remarks = list(found.remarks)
    for folder in found.folders:
        try:
            reader = _open(folder, config, context)
            run = saved_run(reader)
            kept, changes = _fit(config, reader, run, vocab_size, context.world_size)
            engine = build(kept)
            state, seed = _load(kept, engine, context, reader, run)
        except DamagedCheckpointError as error:
            remarks.append(f"passed over {folder}: {error}")
            engine = None  # part of its state may be the damaged checkpoint's
            gc.collect()  # its memory, before the next engine asks for as much
            continue
        return Resumed(engine, state, seed, kept, (*remarks, f"loaded {folder}", *changes))
    raise DamagedCheckpointError(
        f"`load` must hold a whole checkpoint, but {section.load} has none: " + "; ".join(remarks)
    )


def _candidates(section: CheckpointConfig, context: ParallelContext) -> Candidates:
    """The first rank's, so that all try the same: a shared file system may show others an older state."""

    def look() -> dict[str, list[str]]:
        found = candidates(section.load, section.ckpt_step)
        return {"folders": [str(folder) for folder in found.folders], "remarks": list(found.remarks)}

    first = together(context, look if context.rank == 0 else None, f"look into {section.load}")[0]
    return Candidates(tuple(map(Path, first["folders"])), tuple(first["remarks"]))


def _start(
    config: Config,
    context: ParallelContext,
    build: Callable[[Config], Engine],
    foreign: Callable[[str], AbstractContextManager[Source]],
) -> Resumed:
    engine = build(config)
    seed, path = config.training.seed, config.checkpoint.load_hf
    if path is None:
        return Resumed(engine, TrainState(), seed, config)

    def read() -> None:
        parts = parts_to_read(engine.optimizer, context, moments=False)
        with foreign(path) as source:
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


def _fit(
    config: Config, reader: CheckpointReader, run: RunFacts | None, vocab_size: int, world_size: int
) -> tuple[Config, list[str]]:
    """The configuration to continue with, and its differences from the saved one.

    Raises:
        CheckpointError: the checkpoint is of another model, or of another schedule.
        ConfigError: its global batch, which is kept, cannot be dealt to these ranks.
    """
    _check_model(config.model, vocab_size, saved_model(reader), reader.folder)
    if run is None or config.checkpoint.finetune:  # converted weights, or counting anew
        return config, []
    _check_schedule(config, run.config, reader.folder)
    batch = run.global_batch_size
    kept = config
    if config.batch.global_batch_size is None:
        kept = config.model_copy(
            update={"batch": config.batch.model_copy(update={"global_batch_size": batch})}
        )
        if problems := check(kept, world_size):
            raise ConfigError(
                [f"the global batch of {reader.folder} is kept, but does not fit here: {p}" for p in problems]
            )
    changes = [
        f"{where}: {before} -> {now}"
        for where, before, now in _differences(run.config, kept.model_dump(mode="json"))
    ]
    return kept, ["changed since the checkpoint: " + "; ".join(changes)] if changes else []


def _load(
    config: Config,
    engine: Engine,
    context: ParallelContext,
    reader: CheckpointReader,
    run: RunFacts | None,
) -> tuple[TrainState, int]:
    section, optimizer = config.checkpoint, engine.optimizer
    progress = run is not None and not section.finetune
    moments = progress and not section.no_load_optim
    if moments and (run.updates is None or run.scaler is None):
        raise CheckpointError(
            f"`{reader.folder}` was saved without optimizer state; set --no-load-optim or --finetune"
        )
    parts = parts_to_read(optimizer, context, moments=moments)
    unused = _unused(reader, optimizer, context, moments)
    generators = random_state(context.device)
    rows = _random_rows(reader, context, generators) if progress and not section.no_load_rng else []

    def read() -> None:
        check_tensors(reader, parts, reader.folder, unused)
        reader.read([*parts, *rows])

    together(context, read, f"load {reader.folder}")
    optimizer.publish()
    if moments:
        optimizer.updates = run.updates
        engine.scaler_state = ScalerState(**dict(run.scaler))
    if rows:
        together(context, lambda: set_random_state(generators, context.device), f"load {reader.folder}")
    state = TrainState(**dict(run.state)) if progress else TrainState()
    seed = run.stream_seed if progress and not section.no_load_rng else config.training.seed
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


def _unused(
    reader: CheckpointReader, optimizer: Optimizer, context: ParallelContext, moments: bool
) -> list[str]:
    """What the checkpoint holds, of moments only if they are taken, and no rank has a place for."""
    mine = sorted(str(key) for key in state_keys(optimizer))
    asked = {name for names in gather_values(context.model, mine, context.device) for name in names}
    held = [key for key in reader.shapes if key.kind == WEIGHT or (moments and key.kind != RANDOM)]
    return [str(key) for key in held if str(key) not in asked]


def check_tensors(source: Source, parts: Iterable[Part], where: object, unused: Iterable[str] = ()) -> None:
    """Refuse what is missing, of another shape, or left over, by name."""
    wrong = misfits(source.shapes, {part.key: part.shape for part in parts})
    wrong += [f"{name} is not used" for name in unused]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"`{where}` does not fit this model: " + "; ".join(wrong[:_SHOWN]) + more)


def _check_model(model: ModelConfig, vocab_size: int, saved: SavedModel, folder: Path) -> None:
    # A field of another version of the code may be on one side only; its tensors are compared by name.
    fields = [name for name in ModelConfig.model_fields if name in saved.sections["model"]]
    shared = [name for name in fields if name not in FREE_MODEL_FIELDS]
    filled = saved.settings(fields)
    differing = model_differences(filled, model, shared)
    wrong = [f"{name} {before} (now {after})" for name, before, after in differing]
    if saved.vocab_size != vocab_size:
        wrong.append(f"vocab_size {saved.vocab_size} (now {vocab_size})")
    if wrong:
        raise CheckpointError(f"`{folder}` must be of this model, but has {', '.join(wrong)}")


def _check_schedule(config: Config, saved: Mapping[str, Any], folder: Path) -> None:
    if config.checkpoint.override_opt_param_scheduler:
        return
    now, then = config.optimizer.model_dump(mode="json"), saved.get("optimizer") or {}
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
