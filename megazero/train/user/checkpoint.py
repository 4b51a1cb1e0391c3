"""Checkpoints of an engine for a user's module.

``SAVE_DIR/TAG/`` is a checkpoint folder of `megazero.checkpoint`: whole fp32 masters and moments by name,
buffers, and a JSON with the rest, so that any number of replicas and any ZeRO stage can load it. What cannot
be said as plain values and tensors is refused: nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from megazero.checkpoint import SliceReader, Snapshot, iteration_folder, latest_iteration, read_facts
from megazero.checkpoint import save_checkpoint as write_snapshot
from megazero.checkpoint.simple import together, write_text
from megazero.errors import CheckpointError
from megazero.optim import ScalerState
from megazero.zero.init import GatheredParameters

if TYPE_CHECKING:
    from megazero.train.user.engine import UserEngine

LATEST = "latest"


@dataclass(frozen=True)
class Progress:
    """An engine's counters; see `UserEngine`."""

    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int


@dataclass(frozen=True)
class LoadParts:
    """What of a checkpoint is taken.

    Attributes:
        strict: weights that it lacks are refused.
        optimizer: moments, loss scale, and the options of the parameter groups.
        schedule: the state of the learning rate schedule.
        progress: the counters.
    """

    strict: bool = True
    optimizer: bool = True
    schedule: bool = True
    progress: bool = True


def save_checkpoint(
    engine: UserEngine, save_dir: Path, tag: str, client_state: dict[str, Any], save_latest: bool
) -> None:
    """Write a checkpoint; every rank calls this and returns when it is visible.

    Raises:
        CheckpointError: it cannot be written, or a state holds what is no plain value or tensor.
    """
    optimizer, context = engine.optimizer, engine.context
    writes = context.replica.rank == 0
    tensors = {
        f"{spec.name}/{kind}": tensor.cpu() if tensor.is_cuda else tensor.clone()
        for spec, kinds in optimizer.shards.full_state()
        for kind, tensor in kinds.items()
        if writes
    }
    tensors |= {f"{name}/buffer": buffer for name, buffer in _buffers(engine).items()}
    schedule = getattr(engine.lr_scheduler, "state_dict", dict)()
    facts = {
        "progress": asdict(engine.progress()),
        "scaler": vars(optimizer.scaler_state),
        "updates": optimizer.shards.updates,
        "options": encode(optimizer.options(), "options", tensors),
        "schedule": encode(schedule, "schedule", tensors),
        "client": encode(client_state, "client", tensors),
    }
    facts["shapes"] = {key: list(tensor.shape) for key, tensor in tensors.items()}
    write_snapshot(save_dir / tag, engine.global_steps, Snapshot(tensors, facts), context)

    def point() -> None:
        write_text(save_dir / LATEST, f"{tag}\n")

    first = save_latest and context.rank == 0
    together(context, point if first else None, f"write {save_dir / LATEST}")


def load_checkpoint(
    engine: UserEngine, load_dir: Path, tag: str | None, parts: LoadParts
) -> tuple[str | None, dict[str, Any] | None]:
    """Take a checkpoint over; every rank calls this. See `UserEngine.load_checkpoint`."""
    if tag is None:
        pointer = load_dir / LATEST
        if not pointer.exists():
            return None, None
        tag = pointer.read_text(encoding="utf-8").strip()
    folder = load_dir / tag
    iteration = latest_iteration(folder)
    if iteration is None:
        raise CheckpointError(f"`{folder}` must hold a checkpoint, but has none; check the path and the tag")
    place = iteration_folder(folder, iteration)
    facts = read_facts(place)
    wanted = _wanted(engine, parts, facts)
    stored = {key: tuple(shape) for key, shape in facts["shapes"].items() if "/state." in key}
    with SliceReader(place, {**wanted, **stored}, engine.context) as tensors:
        _take_tensors(engine, wanted, tensors)
        optimizer = engine.optimizer
        if parts.optimizer:
            optimizer.set_options(decode(facts["options"], tensors))
            optimizer.shards.updates = facts["updates"]
            optimizer.scaler_state = ScalerState(**facts["scaler"])
        if parts.schedule and hasattr(engine.lr_scheduler, "load_state_dict"):
            engine.lr_scheduler.load_state_dict(decode(facts["schedule"], tensors))
        client = decode(facts["client"], tensors)
    optimizer.zero_grad()
    optimizer.shards.publish()
    if parts.progress:
        engine.resume(Progress(**facts["progress"]))
    return str(folder), client


def _wanted(engine: UserEngine, parts: LoadParts, facts: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Key -> shape of all tensors that the engine is to take from a checkpoint."""
    shards = engine.optimizer.shards
    wanted = {f"{name}/buffer": tuple(buffer.shape) for name, buffer in _buffers(engine).items()}
    for bucket, state in zip(shards.buckets, shards.states, strict=True):
        for kind in ("weight", *state) if parts.optimizer else ("weight",):
            for spec, param in zip(bucket.specs, bucket.params, strict=True):
                wanted[f"{spec.name}/{kind}"] = tuple(param.shape)
    if parts.strict:
        return wanted
    return {key: shape for key, shape in wanted.items() if key in facts["shapes"]}


@torch.no_grad()
def _take_tensors(
    engine: UserEngine, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]
) -> None:
    shards = engine.optimizer.shards
    for bucket, state in zip(shards.buckets, shards.states, strict=True):
        for kind, flat in {"weight": bucket.master, **state}.items():
            for spec, span, piece in bucket.named_pieces(flat):
                key = f"{spec.name}/{kind}"
                if key in wanted:
                    piece.copy_(tensors[key].reshape(-1)[span])
    for name, buffer in _buffers(engine).items():
        key = f"{name}/buffer"
        if key in wanted:
            buffer.copy_(tensors[key])


def _buffers(engine: UserEngine) -> dict[str, Tensor]:
    """The buffers that the module keeps."""
    kept = engine.module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in engine.module.named_buffers() if name in kept}


def module_state(engine: UserEngine, exclude_frozen: bool) -> dict[str, Tensor]:
    """The module's `state_dict`, whole, on the CPU, one parameter after another; every rank calls this."""
    state: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    frozen = {name for name, p in engine.module.named_parameters() if not p.requires_grad}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or (exclude_frozen and name in frozen):
            continue
        if id(value) not in copies:  # tied weights stay one tensor
            with GatheredParameters(value):
                copies[id(value)] = value.detach().clone().cpu()
        state[name] = copies[id(value)]
    return state


def save_module(engine: UserEngine, path: Path, exclude_frozen: bool) -> None:
    """Write `module_state` to a file; every rank calls this.

    Raises:
        CheckpointError: it cannot be written.
    """
    state = module_state(engine, exclude_frozen)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            # This format has no tied weights: each name gets its own.
            save_file({name: value.clone().contiguous() for name, value in state.items()}, path)
        else:
            torch.save(state, path)

    together(engine.context, write if engine.context.rank == 0 else None, f"write {path}")


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON, its tensors beside it; `decode` gives it back, tuples and number keys included.

    Args:
        value: None, numbers, text, lists, tuples, mappings and tensors.
        name: what errors and the tensors' keys call it.
        tensors: gets the tensors.

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
    """What `encode` was given."""
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
