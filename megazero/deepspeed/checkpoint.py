"""Checkpoints of the engine for a user's module.

``SAVE_DIR/TAG/`` is a checkpoint folder of `megazero.checkpoint`: whole fp32 masters and moments by name,
buffers, and a JSON with the rest, so that any number of replicas and any ZeRO stage can load it. State that
plain values and tensors cannot express is refused: nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import candidates
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.replica_rows import ReplicaRows
from megazero.checkpoint.saver import Saver, together
from megazero.checkpoint.shards import parts_to_read, parts_to_write
from megazero.checkpoint.tensor_file import read_bytes
from megazero.deepspeed.moe.experts import with_all_experts
from megazero.deepspeed.stepping import EngineCounters, SteppingEngine
from megazero.deepspeed.tensor_parallel.whole import whole_value
from megazero.deepspeed.zero import GatheredParameters
from megazero.errors import CheckpointError
from megazero.optim.loss_scaler import ScalerState
from megazero.train.resume.fit import check_tensors

LATEST = "latest"
STATE = "state"
"""Kind of tensors that belong to options, schedules and the script."""


@dataclass(frozen=True)
class LoadParts:
    """Which parts of a checkpoint to load.

    Attributes:
        strict: refuse a checkpoint that lacks weights.
        optimizer: moments, loss scale, and the options of the parameter groups.
        schedule: the state of the learning rate schedule.
        progress: the counters.
    """

    strict: bool = True
    optimizer: bool = True
    schedule: bool = True
    progress: bool = True


def save_checkpoint(
    engine: SteppingEngine, save_dir: Path, tag: str, client_state: dict[str, Any], save_latest: bool
) -> None:
    """Write a checkpoint; every rank calls this and returns when it is visible.

    Raises:
        CheckpointError: it cannot be written, or a state holds something other than plain values and tensors.
    """
    optimizer, context = engine.optimizer, engine.context
    states: dict[str, Tensor] = {}
    schedule: dict[str, Any] = getattr(engine.lr_scheduler, "state_dict", dict)()
    facts = {
        "kind": "module",
        "progress": asdict(engine.progress()),
        "scaler": vars(optimizer.scaler_state),
        "updates": optimizer.shards.updates,
        "options": encode(optimizer.options(), "options", states),
        "schedule": encode(schedule, "schedule", states),
        "client": encode(client_state, "client", states),
    }
    parts = parts_to_write(optimizer.shards, context)
    if context.rank == 0:
        whole = {Key(name): buffer.detach() for name, buffer in _buffers(engine).items()}
        whole |= {Key(name, STATE): tensor for name, tensor in states.items()}
        parts += [Part.whole(key, tensor) for key, tensor in whole.items()]
    saver = Saver(save_dir / tag, context)
    try:
        saver.save(engine.global_steps, parts, facts)
    finally:
        saver.close()
    first = save_latest and context.rank == 0
    together(
        context, (lambda: Disk().write_text(save_dir / LATEST, f"{tag}\n")) if first else None, f"name {tag}"
    )


def load_checkpoint(
    engine: SteppingEngine, load_dir: Path, tag: str | None, parts: LoadParts
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint; every rank calls this. See `DeepSpeedEngine.load_checkpoint`."""
    if tag is None:
        pointer = load_dir / LATEST
        if not pointer.exists():
            return None, None
        tag = read_bytes(pointer, most=1000).decode(errors="replace").strip()
        if not tag or "\0" in tag or Path(tag).is_absolute() or ".." in Path(tag).parts:
            raise CheckpointError(
                f"`{pointer}` must name a folder beside it, but holds {tag!r:.60}; correct it or give a tag"
            )
    folder = load_dir / tag
    checkpoints = candidates(folder)
    if not checkpoints.folders:
        raise CheckpointError(f"`{folder}` must hold a checkpoint, but has none; check the path and the tag")
    readers: list[CheckpointReader] = []
    newest = checkpoints.folders[0]
    together(engine.context, lambda: readers.append(CheckpointReader(newest)), f"open {folder}")
    (reader,) = readers
    if reader.facts.get("kind") != "module":
        raise CheckpointError(
            f"`{reader.folder}` must be of a module, but is of {reader.facts.get('kind')}; "
            f"load it with `--load`"
        )
    states: dict[str, Tensor] = {}

    def read() -> None:
        wanted = _wanted(engine, parts)
        if not parts.strict:
            wanted = [part for part in wanted if part.key in reader.shapes]
        source = ReplicaRows(reader, wanted, engine.optimizer.shards.private_kinds)
        check_tensors(source, wanted, reader.folder)
        source.read(wanted)
        states.update({key.name: reader.tensor(key) for key in reader.shapes if key.kind == STATE})

    together(engine.context, read, f"load {reader.folder}")
    facts, optimizer = reader.facts, engine.optimizer
    if parts.optimizer:
        optimizer.set_options(decode(facts["options"], states))
        optimizer.shards.updates = facts["updates"]
        optimizer.scaler_state = ScalerState(**facts["scaler"])
    if parts.schedule and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(decode(facts["schedule"], states))
    client = decode(facts["client"], states)
    optimizer.zero_grad()
    optimizer.shards.publish()
    if parts.progress:
        engine.resume(EngineCounters(**facts["progress"]))
    return str(folder), client


def _wanted(engine: SteppingEngine, parts: LoadParts) -> list[Part]:
    """All tensors that the engine should load from a checkpoint."""
    wanted = parts_to_read(engine.optimizer.shards, engine.context, moments=parts.optimizer)
    return wanted + [Part.whole(Key(name), buffer.detach()) for name, buffer in _buffers(engine).items()]


def _buffers(engine: SteppingEngine) -> dict[str, Tensor]:
    """The module's persistent buffers."""
    kept = engine.module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in engine.module.named_buffers() if name in kept}


def module_state(engine: SteppingEngine, exclude_frozen: bool) -> dict[str, Tensor]:
    """The module's `state_dict`, whole, on the CPU, one parameter after another; every rank calls this."""
    state: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    frozen = {name for name, p in engine.module.named_parameters() if not p.requires_grad}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or (exclude_frozen and name in frozen):
            continue
        if id(value) not in copies:  # tied weights stay one tensor
            with GatheredParameters(value):
                copies[id(value)] = whole_value(value, engine.context.tp).clone().cpu()
        state[name] = copies[id(value)]
    return with_all_experts(state, engine.module, engine.context)


def save_module(engine: SteppingEngine, path: Path, exclude_frozen: bool) -> None:
    """Write `module_state` to a file; every rank calls this.

    Raises:
        CheckpointError: it cannot be written.
    """
    state = module_state(engine, exclude_frozen)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            # This format has no tied weights: each name gets a copy of its own.
            try:
                save_file({name: value.clone().contiguous() for name, value in state.items()}, path)
            except SafetensorError as error:
                raise CheckpointError(f"`{path}` cannot be written: {error}") from error
        else:
            torch.save(state, path)

    together(engine.context, write if engine.context.rank == 0 else None, f"write {path}")


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON, with its tensors separate; `decode` restores it, including tuples and number keys.

    Args:
        value: None, numbers, text, lists, tuples, mappings and tensors.
        name: its name in errors and in the tensors' keys.
        tensors: receives the tensors.

    Raises:
        CheckpointError: for anything else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        key = f"{name}/state.{len(tensors)}"
        tensors[key] = value.detach()
        return {"tensor": key}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        # As pairs: JSON would turn numbers that are keys into text.
        return {
            "mapping": [
                [encode(key, name, tensors), encode(item, f"{name}.{key}", tensors)]
                for key, item in value.items()
            ]
        }
    raise CheckpointError(
        f"`{name}` must be made of numbers, text, lists, dictionaries and tensors to be saved, but holds a "
        f"{type(value).__name__}; convert or leave it out"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in content)
    return {decode(key, tensors): decode(item, tensors) for key, item in content}
