"""Save and load an engine's checkpoints.

``SAVE_DIR/TAG/`` is a checkpoint folder of `megazero.checkpoint`: fp32 masters, moments and buffers, whole
and by name, and a JSON with all other state. Any number of replicas at any ZeRO stage can load it. Folders
that DeepSpeed wrote are loaded too, see `megazero.formats.deepspeed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.part import WEIGHT, Key, Part, Source
from megazero.checkpoint.replica_rows import ReplicaRows
from megazero.checkpoint.saver import Saver, together
from megazero.checkpoint.shards import parts_to_read, parts_to_write
from megazero.deepspeed.checkpoint.plain import encode
from megazero.deepspeed.checkpoint.saved import STATE, Saved, open_saved
from megazero.deepspeed.checkpoint.tags import LATEST
from megazero.deepspeed.engine.state import EngineState
from megazero.deepspeed.engine.weights import StateSource, frozen_names, shared_names
from megazero.deepspeed.moe.experts import older_names
from megazero.deepspeed.zero.gathered import GatheredParameters
from megazero.deepspeed.zero_to_fp32 import write_scripts
from megazero.formats.deepspeed.vectors import Shapes
from megazero.mpu.messages import broadcast_value, fold_values
from megazero.train.resume.fit import check_tensors

CustomLoad = Callable[..., object]
"""Loads whole weights, `src`, into a module, `dst`."""


@dataclass(frozen=True)
class LoadParts:
    """The parts of a checkpoint to load.

    Attributes:
        strict: refuse a checkpoint with missing or unexpected weights.
        optimizer: load moments, loss scale, and the options of parameter groups.
        schedule: load the state of the learning rate schedule.
        progress: load the counters.
        custom: loads the weights instead; None loads them as usual.
    """

    strict: bool = True
    optimizer: bool = True
    schedule: bool = True
    progress: bool = True
    custom: CustomLoad | None = None


def save_checkpoint(
    engine: EngineState,
    save_dir: Path,
    tag: str,
    client_state: Mapping[str, object],
    save_latest: bool = True,
    left_out: Collection[str] = (),
) -> None:
    """Write a checkpoint; every rank calls this, and returns when the folder is complete.

    Args:
        engine: the engine's state.
        save_dir: a folder that every rank sees.
        tag: the name of the checkpoint's folder in `save_dir`.
        client_state: the script's own values; rank 0's are written.
        save_latest: write the tag to `latest`.
        left_out: names of parameters to leave out.

    Raises:
        CheckpointError: it cannot be written, or a state holds a value that cannot be saved.
    """
    optimizer, context, module = engine.states, engine.context, engine.module
    states: dict[str, Tensor] = {}
    schedule: Mapping[str, object] = getattr(engine.lr_scheduler, "state_dict", dict)()
    facts = {
        "kind": "module",
        "progress": asdict(engine.progress()),
        "scaler": vars(optimizer.scaler_state),
        "updates": optimizer.shards.updates,
        "options": encode(optimizer.options(), "options", states),
        "schedule": encode(schedule, "schedule", states),
        "client": encode(client_state, "client", states, objects=True),
        "frozen": sorted(frozen_names(module)),
        "buffers": sorted(_buffers(engine)),
        "shared": shared_names(module),
        "left_out": sorted(left_out),
    }
    parts = [p for p in parts_to_write(optimizer.shards, context) if p.key.name not in left_out]
    if context.groups["stage"].rank == 0:
        copied = getattr(module, "copied_buffers", ())
        whole = {Key(name): b.detach() for name, b in _buffers(engine).items() if name not in copied}
        if context.rank == 0:
            whole |= {Key(name, STATE): tensor for name, tensor in states.items()}
        parts += [Part.whole(key, tensor) for key, tensor in whole.items()]
    saver = Saver(save_dir / tag, context)
    try:
        saver.save(engine.global_steps, parts, facts)
    finally:
        saver.close()

    def finish() -> None:
        if save_latest:
            Disk().write_text(save_dir / LATEST, f"{tag}\n")
        if engine.settings.zero.stage:
            write_scripts(save_dir)

    together(context, finish if context.rank == 0 else None, f"name {tag}")


def load_checkpoint(engine: EngineState, folder: Path, parts: LoadParts) -> dict[str, object]:
    """Load the checkpoint in a tag's folder; every rank calls this. Returns the `client_state`."""
    result: list[Saved] = []
    groups = _groups(engine)
    together(
        engine.context,
        lambda: result.append(open_saved(folder, groups, optimizer=parts.optimizer)),
        f"open {folder}",
    )
    saved = result[0].renamed(engine.module)
    clients: list[dict[str, object]] = []

    def read() -> None:
        clients.append(saved.beside.client())
        _read(engine, saved, parts)

    if parts.strict and parts.custom is None:
        _check_names(engine, saved.source, saved.weight_names(), folder)
    together(engine.context, read, f"load {folder}")
    if parts.custom is not None:
        source = saved.source
        weights = {key.name: source.tensor(key) for key in source.shapes if key.kind == WEIGHT}
        weights |= {alias: weights[name] for alias, name in saved.names.shared.items() if name in weights}
        _load_custom(engine, weights, parts.custom)
    optimizer = engine.states
    if parts.optimizer:
        if options := saved.beside.options():
            known = {name for group in optimizer.options() for name in group}
            optimizer.set_options([{k: v for k, v in group.items() if k in known} for group in options])
        optimizer.shards.updates = saved.updates or 0
        optimizer.scaler_state = saved.beside.scaler(optimizer.scaler) or optimizer.scaler_state
    schedule = saved.beside.schedule() if parts.schedule else None
    if schedule is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(schedule)
    optimizer.zero_grad()
    optimizer.shards.publish()
    if parts.progress:
        engine.resume(saved.beside.progress(engine.settings.batch.accumulation))
    return clients[0]


def _read(engine: EngineState, saved: Saved, parts: LoadParts) -> None:
    """Fill this rank's shards and buffers from a checkpoint."""
    wanted = parts_to_read(engine.states.shards, engine.context, moments=parts.optimizer)
    if parts.custom is None:
        wanted += [Part.whole(Key(name), value.detach()) for name, value in _buffers(engine).items()]
    else:
        wanted = [part for part in wanted if part.key.kind != WEIGHT]
    frozen = frozen_names(engine.module) & set(saved.names.left_out)
    saved_keys = saved.source.shapes.keys()
    wanted = [part for part in wanted if part.key in saved_keys or part.key.name not in frozen]
    if not parts.strict:
        wanted = [part for part in wanted if part.key in saved_keys]
    wanted = saved.fill_missing_moments(wanted)
    source = ReplicaRows(saved.source, wanted, engine.states.shards.private_kinds)
    check_tensors(source, wanted, saved.where)
    source.read(wanted)


def _check_names(engine: EngineState, source: Source, names: set[str], where: object) -> None:
    """Refuse weights that no rank's module has; a tied weight may have any of its names."""
    own = {*engine.module.state_dict(keep_vars=True), *(n for n, _ in engine.module.named_parameters())}
    world, device = engine.context.world, engine.context.device
    folded = fold_values(world, sorted(own), lambda some, others: sorted({*some, *others}), device)
    check_tensors(source, [], where, sorted(names - set(broadcast_value(world, folded, device))))


def _load_custom(engine: EngineState, state: Mapping[str, Tensor], custom: CustomLoad) -> None:
    """Let the script load whole weights into the module; all ranks get the first replica's values."""
    with GatheredParameters(engine.module.parameters(), modifier_rank=engine.context.replica.ranks[0]):
        custom(src=state, dst=engine.module)


def load_module_state(
    engine: EngineState, state: Mapping[str, Tensor], strict: bool, custom: CustomLoad | None
) -> None:
    """Load a whole `state_dict` into the module and its masters; every rank calls this with the same one.

    Raises:
        CheckpointError: names or shapes differ from the module's.
    """
    if custom is not None:
        _load_custom(engine, state, custom)
    else:
        names = older_names(engine.module, state)
        source = StateSource({names.get(name, name): value for name, value in state.items()})
        if strict:
            _check_names(engine, source, {key.name for key in source.shapes}, "checkpoint")
        wanted = parts_to_read(engine.states.shards, engine.context, moments=False)
        wanted += [Part.whole(Key(name), value.detach()) for name, value in _buffers(engine).items()]
        if not strict:
            wanted = [part for part in wanted if part.key in source.shapes]

        def read() -> None:
            check_tensors(source, wanted, "checkpoint")
            source.read(wanted)

        together(engine.context, read, "load the module's state")
    engine.states.zero_grad()
    engine.states.shards.publish()


def _groups(engine: EngineState) -> list[Shapes]:
    """The whole shapes of the trained parameters of each optimizer group, by name."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    return [
        {
            names[id(param)]: tuple(param.shape)
            for param in group["params"]
            if param.requires_grad and id(param) in names
        }
        for group in engine.states.param_groups
    ]


def _buffers(engine: EngineState) -> dict[str, Tensor]:
    """The module's persistent buffers."""
    persistent = engine.module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in engine.module.named_buffers() if name in persistent}
