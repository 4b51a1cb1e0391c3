"""Writes a quantized model as a folder of compressed-tensors, block by block."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.naming import Table, TensorLink
from megazero.checkpoint.part import WEIGHT
from megazero.checkpoint.tensor_file import write_bytes, write_tensors
from megazero.checkpoint.writer import NAMES as INDEX
from megazero.errors import CheckpointError, ConfigError
from megazero.formats.hf.architecture import GENERATING, Architecture
from megazero.formats.hf.architectures import DECODERS
from megazero.formats.hf.config_json import CONFIG, NO_TOKENS, architecture_of, config_of, objections
from megazero.formats.hf.folder import SINGLE
from megazero.formats.hf.packed import BYTES, FIELD, PACKED
from megazero.formats.hf.tokenizer_files import tokenizer_files
from megazero.formats.hf.writer import GENERATION, NAMES, HFTensor, check_source, read_theirs
from megazero.quantize.blocks import BlockModel
from megazero.quantize.layers import QuantizedBlock
from megazero.quantize.recipe import Recipe
from megazero.quantize.report import Report

REPORT = "quantization_report"
"""The name of the report's files."""
_HEAD = "lm_head"


@dataclass(frozen=True)
class Layout:
    """The tensors of a folder of transformers, and which of them are codes.

    Attributes:
        architecture: the class in transformers.
        tensors: all tensors, in order.
        coded: our names of the weights that are quantized.
    """

    architecture: Architecture
    tensors: tuple[HFTensor, ...]
    coded: frozenset[str]

    @classmethod
    def of(cls, model: BlockModel, recipe: Recipe, architecture: str | None = None) -> Layout:
        """Choose the class of transformers: the one named, the weights' own, or the first that can hold codes.

        Raises:
            CheckpointError: transformers has no such model, or none whose linear layers can be packed.
            ConfigError: groups do not divide the inputs of a weight, or nothing is left to quantize.
        """
        settings = model.config.model
        named = architecture or model.origin
        fitting = [own for own in DECODERS if not objections(own, settings) and named in (None, own.name)]
        if not fitting:
            architecture_of(settings, architecture)  # says why
        linears = model.linears()
        refused = []
        for own in fitting or DECODERS:
            layout = cls._in(own, model, recipe, linears)
            if not (wrong := [name for name in layout.coded if not layout._can_pack(name)]):
                layout._check(recipe, linears)
                return layout
            refused.append(f"{own.name} stores {wrong[0]} otherwise")
        raise CheckpointError(
            "the linear layers must be stored as [outputs, inputs] in transformers to be packed, but "
            f"{'; '.join(refused)}; give another `--architecture`"
        )

    @classmethod
    def _in(
        cls,
        architecture: Architecture,
        model: BlockModel,
        recipe: Recipe,
        linears: Mapping[str, tuple[int, ...]],
    ) -> Layout:
        spec, size = model.spec, model.saved.vocab_size
        table, blank = (
            Table.of(rules, spec, size) for rules in (architecture.rules, architecture.without_ours)
        )
        check_source(model.source, table)
        fused = {part: whole for whole, parts in architecture.fused_in(len(spec.layers)) for part in parts}
        tensors = HFTensor.joined((*table.links, *blank.links), fused, recipe.grid.dtype)
        left = {
            link.key.name
            for tensor in tensors
            for link in tensor.links
            if recipe.ignores(_module(tensor.theirs))
        }
        return cls(architecture, tensors, frozenset(linears.keys() - left))

    def is_coded(self, tensor: HFTensor) -> bool:
        """Whether a tensor is stored as codes."""
        return all(link.key.name in self.coded for link in tensor.links)

    def _can_pack(self, name: str) -> bool:
        """Whether a weight of ours has its inputs as the last dim of matrices in transformers."""
        tensors = [tensor for tensor in self.tensors if any(link.key.name == name for link in tensor.links)]
        return bool(tensors) and all(
            tensor.theirs.endswith(".weight") and self.is_coded(tensor) and all(map(_in_rows, tensor.links))
            for tensor in tensors
        )

    def _check(self, recipe: Recipe, linears: Mapping[str, tuple[int, ...]]) -> None:
        group = recipe.grid.group
        wrong = sorted(name for name in self.coded if group is not None and linears[name][-1] % group)
        if wrong:
            sizes = sorted({linears[name][-1] for name in wrong})
            raise ConfigError(
                f"`--group-size` must divide the inputs of all weights, but is {group}, and {wrong[0]} and "
                f"{len(wrong) - 1} others have {', '.join(map(str, sizes))}; take "
                f"{math.gcd(group or 0, *sizes)}, or leave them as they are by `--ignore`"
            )
        if not self.coded:
            raise ConfigError("`--ignore` must leave weights to quantize, but leaves none; name fewer")

    def left(self) -> list[str]:
        """The modules of transformers whose weights are not quantized."""
        coded = {_module(tensor.theirs) for tensor in self.tensors if self.is_coded(tensor)}
        return [module for tensor in self.tensors if (module := _module(tensor.theirs)) not in coded]

    def ignored(self) -> list[str]:
        """The field ``ignore``: linear layers that are not quantized, and others of two dims."""
        left = [
            t
            for t in self.tensors
            if not self.is_coded(t) and len(t.their_shape) == 2 and ".layers." in t.theirs
        ]
        return [_HEAD, *(name for tensor in left if (name := _module(tensor.theirs)) != _HEAD)]


def _module(theirs: str) -> str:
    return theirs.rpartition(".")[0] or theirs


def _in_rows(link: TensorLink) -> bool:
    """Whether the last dim of both tensors is the same, and whole."""
    last = len(link.shape) - 1
    return len(link.merged) == 2 and link.merged[1] == (last,) and link.box.shape[last] == link.shape[last]


def _rows(link: TensorLink, ours: Tensor) -> Tensor:
    """Their rows [n, k] of a link, of a tensor [all our rows, k]."""
    columns = ours.shape[1]
    box = Box((*link.box.offset[:-1], 0), (*link.box.shape[:-1], columns))
    narrow = replace(link, shape=(*link.shape[:-1], columns), box=box)
    theirs = torch.empty(narrow.their_shape, dtype=ours.dtype)
    narrow.as_ours(theirs).copy_(ours.view(narrow.shape)[box.slices])
    return theirs


class FolderWriter:
    """Collects the tensors of blocks, and writes them to files of a new folder as they fill.

    Args:
        disk: writes the files.
        folder: the folder.
        model, layout, recipe: what is written.
        max_shard_bytes: the size at which another file is begun.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        model: BlockModel,
        layout: Layout,
        recipe: Recipe,
        max_shard_bytes: int,
    ):
        self._disk, self._folder, self._most = disk, folder, max_shard_bytes
        self._model, self._layout, self._recipe = model, layout, recipe
        self._constants = {constant.rule.ours: constant.number for constant in layout.architecture.constants}
        self._by_name: dict[str, list[HFTensor]] = defaultdict(list)
        for tensor in layout.tensors:
            for link in tensor.links:
                self._by_name[link.key.name].append(tensor)
        self._written: set[str] = set()
        self._pending: list[tuple[str, Tensor]] = []
        self._files: list[list[str]] = []
        self._before = self._after = 0

    def add(self, block: QuantizedBlock) -> None:
        """Take the tensors of a block."""
        for name in block.values:
            for tensor in self._by_name[name]:
                if tensor.theirs not in self._written:
                    self._add(tensor, block)

    def finish(self, report: Report) -> Report:
        """Write all other files; returns the report, with the bytes of all tensors."""
        for tensor in self._layout.tensors:
            if tensor.theirs not in self._written:
                self._add(tensor, QuantizedBlock("", {}, {}, ()))
        self._flush()
        names = [SINGLE]
        if len(self._files) > 1:
            names = [
                f"model-{n:05d}-of-{len(self._files):05d}.safetensors" for n in range(1, len(self._files) + 1)
            ]
            places = {tensor: name for name, held in zip(names, self._files, strict=True) for tensor in held}
            self._write(INDEX, {"metadata": {"total_size": self._after}, "weight_map": places})
        for number, name in enumerate(names):
            self._disk.rename(self._folder / _numbered(number), self._folder / name)
        settings = self._model.config.model
        files = tokenizer_files(self._model.config.tokenizer, settings.vocab_size, settings.positions)
        architecture, tokens = self._layout.architecture, self._model.tokens or files.tokens or NO_TOKENS
        size, dtype = self._model.saved.vocab_size, NAMES[self._recipe.grid.dtype]
        config = config_of(architecture, settings, size, tokens, dtype)
        self._write(CONFIG, {**config, FIELD: quantization_config(self._recipe, self._layout.ignored())})
        if architecture.auto == GENERATING:
            self._write(GENERATION, tokens.as_json())
        report = replace(report, bytes_before=self._before, bytes_after=self._after)
        own = ((f"{REPORT}.txt", report.as_text().encode()), (f"{REPORT}.json", report.as_json().encode()))
        for name, content in (*files.files, *own):
            write_bytes(self._disk, self._folder / name, content)
        return report

    def _add(self, tensor: HFTensor, block: QuantizedBlock) -> None:
        self._written.add(tensor.theirs)
        self._before += tensor.size
        for name, stored in self._stored(tensor, block):
            self._pending.append((name, stored))
            self._after += stored.nbytes
        if sum(stored.nbytes for _, stored in self._pending) >= self._most:
            self._flush()

    def _stored(self, tensor: HFTensor, block: QuantizedBlock) -> list[tuple[str, Tensor]]:
        if not self._layout.is_coded(tensor):
            rows = [self._floats(link, tensor, block) for link in tensor.links]
            return [(tensor.theirs, rows[0] if len(rows) == 1 else torch.cat(rows))]
        parts = [(link, block.quantized[link.key.name]) for link in tensor.links]
        codes = torch.cat([_rows(link, part.codes.cpu()) for link, part in parts])
        scales = torch.cat([_rows(link, part.scales.cpu()) for link, part in parts])
        whole = replace(parts[0][1], codes=codes, scales=scales)
        module = _module(tensor.theirs)
        scale = (f"{module}.weight_scale", scales)
        if self._recipe.rounds_inputs:
            return [(tensor.theirs, codes), scale]
        shape = torch.tensor(codes.shape, dtype=torch.int64)
        return [(f"{module}.weight_packed", whole.packed()), scale, (f"{module}.weight_shape", shape)]

    def _floats(self, link: TensorLink, tensor: HFTensor, block: QuantizedBlock) -> Tensor:
        value = block.values.get(link.key.name) if link.key.kind == WEIGHT else None
        if value is None and link.key in self._model.source.shapes:
            return read_theirs(self._model.source, link, tensor.dtype)
        theirs = torch.empty(link.their_shape, dtype=tensor.dtype)
        if value is None:
            return theirs.fill_(self._constants.get(link.key.name, 0.0))
        link.as_ours(theirs).copy_(value[link.box.slices])
        return theirs

    def _flush(self) -> None:
        if self._pending:
            path = self._folder / _numbered(len(self._files))
            write_tensors(self._disk, path, self._pending, metadata={"format": "pt"}, hashed=False)
            self._files.append([name for name, _ in self._pending])
            self._pending = []

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        write_bytes(self._disk, self._folder / name, text.encode())


def _numbered(number: int) -> str:
    return f"part-{number:05d}"


def quantization_config(recipe: Recipe, ignore: Iterable[str]) -> dict[str, Any]:
    """The field of ``config.json`` by which compressed-tensors reads the folder."""
    grid = recipe.grid
    weights = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if grid.group is None else "group",
        "group_size": grid.group,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": BYTES if recipe.rounds_inputs else PACKED,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs if recipe.rounds_inputs else None,
                "output_activations": None,
            }
        },
    }


def in_short(modules: Iterable[str]) -> tuple[str, ...]:
    """Names of modules, with ``*`` for the numbers of layers and experts."""
    return tuple(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", module) for module in modules))
