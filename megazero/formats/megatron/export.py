"""Exports a megazero checkpoint in Megatron-LM's `torch_dist` format."""

from __future__ import annotations

import io
import json
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.described import check_saved_model
from megazero.checkpoint.disk import Disk, appear
from megazero.checkpoint.manifest import STATE, Facts
from megazero.checkpoint.naming import TensorLink
from megazero.checkpoint.part import WEIGHT, Key, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.tensor_file import Later, narrowed
from megazero.checkpoint.writer import SHARD_BYTES
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.formats.megatron.arguments import arguments_of, optimizer_of, schedule_of
from megazero.formats.megatron.dialects import BLOCK, EXPERT, layer_of
from megazero.formats.megatron.dist_file import ArrayPart, write_arrays
from megazero.formats.megatron.hybrid import with_both
from megazero.formats.megatron.latent import with_latent
from megazero.formats.megatron.masked import with_masked_head
from megazero.formats.megatron.names import links_of, rules
from megazero.formats.megatron.rank_optimizer import MOMENTS
from megazero.spec.model import ModelSpec
from megazero.spec.resolve import model_spec

TRACKER = "latest_checkpointed_iteration.txt"
_LAYER = re.compile(r"decoder\.layers\.\d+\.(.*)")
_SMALL_NORM = re.compile(r"^self_attention\.(q|kv)_layernorm\.")
_FURTHER = re.compile(rf"({re.escape(BLOCK)}\d+\.transformer_layer\.)")


@dataclass(frozen=True)
class ExportOptions:
    """The user's choices for an export.

    Attributes:
        dtype: the dtype of the model's weights.
        with_optimizer: whether to write masters, moments and progress too.
        file_bytes: the size at which another file is begun.
    """

    dtype: torch.dtype = torch.float32
    with_optimizer: bool = False
    file_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class ExportedCheckpoint:
    """The folder that was written, and the numbers of tensors and bytes in it."""

    folder: Path
    tensors: int
    size: int


def export_megatron(
    reader: CheckpointReader, directory: str | Path, options: ExportOptions, disk: Disk | None = None
) -> ExportedCheckpoint:
    """Write a checkpoint for Megatron-LM, one tensor in memory at a time. After a failure nothing is left.

    Args:
        reader: the checkpoint.
        directory: the run's folder to write into.
        options: the user's choices.
        disk: makes all changes to the file system.

    Raises:
        CheckpointError: Megatron-LM lacks such a model, the checkpoint lacks the optimizer's state, or the
            folder cannot be written.
    """
    disk, directory = disk or Disk(), Path(directory)
    facts = reader.facts
    sections = facts.get("config") or facts
    model = ModelConfig.model_validate(sections["model"])
    size = int(facts["vocab_size"])
    check_saved_model(model, size, reader.shapes, reader.folder / STATE)
    spec, arguments = model_spec(model), arguments_of(model, size, facts, options.dtype)
    arguments["no_save_optim"] = not options.with_optimizer
    beside = {**optimizer_of(facts), **schedule_of(facts)} if options.with_optimizer else {}
    iteration = reader.manifest.iteration
    folder = directory / f"iter_{iteration:07d}"
    if os.path.lexists(folder):
        raise CheckpointError(f"`{folder}` must not exist yet, but does; name another folder")
    common = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "content_metadata": _content(spec, options),
        **beside,
    }
    parts = list(_parts(reader, spec, size, arguments["padded_vocab_size"], options))

    def fill(aside: Path) -> dict[str, int]:
        _write_common(disk, aside, common)
        with reader:
            return write_arrays(disk, aside, parts, _states(spec, size), options.file_bytes)

    try:
        sizes = appear(disk, folder, fill)
        disk.write_text(directory / TRACKER, str(iteration))
        disk.sync_folder(directory)
    except OSError as error:
        raise CheckpointError(f"`{directory}` must be written, but cannot be: {error}") from error
    return ExportedCheckpoint(
        folder, len({name for part in parts for name in part.names}), sum(sizes.values())
    )


def _write_common(disk: Disk, folder: Path, common: Facts) -> None:
    buffer = io.BytesIO()
    torch.save({**common, "args": Namespace(**common["args"])}, buffer)
    form = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    form |= {"common_backend": "torch", "common_backend_version": 1}
    for name, content in (("common.pt", buffer.getvalue()), ("metadata.json", json.dumps(form).encode())):
        with disk.create(folder / name) as file:
            file.write(content)
            file.sync()


def _content(spec: ModelSpec, options: ExportOptions) -> dict[str, bool | str]:
    """``content_metadata``, which tells Megatron the naming and form of the tensors."""
    content: dict[str, bool | str] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if options.with_optimizer:
        content["distrib_optim_sharding_type"] = "fully_reshardable"
    return {**content, "non_homogeneous_layers": not _alike(spec)}


def _alike(spec: ModelSpec) -> bool:
    """Whether all layers have the same tensors, so that Megatron stacks them."""
    return len({layer.experts for layer in spec.layers}) == 1 and all(map(with_both, spec.layers))


def _parts(
    reader: CheckpointReader, spec: ModelSpec, size: int, rows: int, options: ExportOptions
) -> Iterator[ArrayPart]:
    """The tensors to write; `rows` are those of the padded vocabulary."""
    for name, (sliced, link) in links_of(rules(3.0), spec, size).items():
        if link.key.kind != WEIGHT and link.key not in reader.shapes:
            continue  # a router of converted weights has no bias yet
        target, own = _target(name, spec), link.their_shape
        padded = (rows, *own[1:]) if sliced.letter == "v" else own
        shape = (*target.stacked, *padded)
        box = Box((*target.at, *[0] * len(own)), (*[1] * len(target.at), *padded))
        for key, dtype, prefixes in _uses(link.key, options):
            names = tuple(f"{prefix}{called}" for prefix in prefixes for called in target.names)
            make = partial(_theirs, reader, link, key, padded, dtype)
            yield ArrayPart(names, shape, box, Later(dtype, box.shape, make))


def _uses(key: Key, options: ExportOptions) -> Iterator[tuple[Key, torch.dtype, tuple[str, ...]]]:
    """The tensors to write for one of ours and its state: (key, dtype, prefixes of its names)."""
    weight = key.kind == WEIGHT
    state = weight and options.with_optimizer
    masters = ("optimizer.state.param.", "optimizer.state.fp32_param.") if state else ()
    dtype = options.dtype if weight else torch.float32
    if dtype is torch.float32:
        yield key, dtype, ("", *masters)
    else:
        yield key, dtype, ("",)
        if masters:
            yield key, torch.float32, masters
    for kind in MOMENTS if state else ():
        yield Key(key.name, kind), torch.float32, (f"optimizer.state.{kind}.",)


def _states(spec: ModelSpec, size: int) -> Iterator[str]:
    """The names of extra states of Core's modules, which it expects to find; they are empty but for fp8."""
    yield "output_layer._extra_state/shard_0_1"
    for name in links_of(rules(3.0), spec, size):
        target = _target(name, spec)
        for called in target.names:
            module, _, suffix = called.removesuffix(".z").rpartition(".")
            where = ".".join(map(str, target.at or (0,))), ".".join(map(str, target.stacked or (1,)))
            if suffix == "weight" and called.startswith(("decoder.", "encoder.", BLOCK)):
                yield f"{module}._extra_state/shard_{where[0]}_{where[1]}"
            if called.endswith(("linear_qkv.weight", "linear_kv_up_proj.weight")):
                module = module.rpartition(".")[0] + ".core_attention"
                yield f"{module}._extra_state/shard_{where[0]}_{where[1]}"


@dataclass(frozen=True)
class _Target:
    """A tensor's place in the export: its names, and the index in and sizes of the stacked dims."""

    names: tuple[str, ...]
    at: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()


def _target(name: str, spec: ModelSpec) -> _Target:
    number = layer_of(name)
    further = _FURTHER.match(name)
    at: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()
    if number is not None or further is not None:
        layer = spec.every_layer[len(spec.layers) if number is None else number]
        experts = layer.experts
        if further is not None:  # blocks for multi-token prediction are never stacked
            block, plain = further[1], name[further.end(1) :]
        elif _alike(spec):
            block, plain = "decoder.layers.", _LAYER.sub(r"\1", name)
            at, stacked = (number or 0,), (len(spec.layers),)
        else:
            block, plain = f"decoder.layers.{number}.", _LAYER.sub(r"\1", name)
        if match := EXPERT.fullmatch(name):
            at, stacked = (*at, int(match[2])), (*stacked, experts)
            plain = f"mlp.experts.experts.{match[3]}"
        names = set(_called(plain, experts, latent=with_latent(layer)))
        others = tuple(f"{block}{called}" for called in sorted(names))
    else:
        others = (name,)
        if not all(map(with_both, spec.layers)):
            others = (name.replace("decoder.final_layernorm.", "decoder.final_norm."),)
    if with_masked_head(spec):
        others = tuple(re.sub(r"^decoder\.", "encoder.", called) for called in others)
    return _Target(others, at, stacked)


def _called(plain: str, experts: int, *, latent: bool) -> Iterator[str]:
    """The names of a layer's tensor with Transformer Engine and, if they differ, without it."""
    fused = plain.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    fused = re.sub(r"^norm\.", "mixer.in_proj.layer_norm_", fused)
    if latent:
        fused = _SMALL_NORM.sub(r"self_attention.linear_\1_up_proj.layer_norm_", fused)
    else:
        fused = fused.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    yield fused
    # Without Transformer Engine, norms of latent attention and before experts have modules of their own.
    if latent or (experts and plain.startswith("pre_mlp")):
        yield plain


def _theirs(
    reader: CheckpointReader, link: TensorLink, key: Key, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Read a tensor of Megatron's, with zeros in the padding of the vocabulary."""
    theirs = torch.zeros(shape)
    own = theirs[: link.their_shape[0]] if shape else theirs
    reader.read([Part(key, link.shape, link.box, link.as_ours(own))])
    return narrowed(key, theirs, dtype)
