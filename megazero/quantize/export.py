"""A quantized model as a folder of compressed-tensors: which class of transformers holds it, and how."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.naming import TensorLink
from megazero.checkpoint.part import WEIGHT, Key, Part, Source
from megazero.checkpoint.tensor_file import Later
from megazero.errors import CheckpointError, ConfigError
from megazero.formats.hf.architecture import Architecture
from megazero.formats.hf.architectures import DECODERS
from megazero.formats.hf.config_json import architecture_of, objections
from megazero.formats.hf.packed import BYTES, PACKED, QuantizedWeight, words_of
from megazero.formats.hf.stream import HFTensor
from megazero.quantize.blocks import BlockModel
from megazero.quantize.layers import QuantizedBlock
from megazero.quantize.recipe import Recipe

_OWN_PRODUCTS = frozenset({"FalconForCausalLM", "Mamba2ForCausalLM"})
"""Classes of transformers 5 whose products read `weight`, which packed linear layers do not have."""


@dataclass(frozen=True)
class Layout:
    """The tensors of a folder of transformers, and which of them are codes.

    Attributes:
        architecture: the class in transformers.
        tensors: all tensors, in the order of blocks.
        coded: our names of the weights that are quantized.
        recipe: the scheme.
    """

    architecture: Architecture
    tensors: tuple[HFTensor, ...]
    coded: frozenset[str]
    recipe: Recipe

    @classmethod
    def of(cls, model: BlockModel, recipe: Recipe, name: str | None = None) -> Layout:
        """The layout in the class called `name`, or that of the weights, or the first that can hold codes.

        Raises:
            CheckpointError: transformers has no class for such a model, or none that can hold codes.
            ConfigError: groups do not divide the inputs of a weight, nothing is left to quantize, or the
                model has weights of few bits already.
        """
        if bits := model.facts.get("weight_bits"):
            raise ConfigError(
                f"the model must be in full precision, but has weights of {bits} bits already; take "
                "that which it was made from"
            )
        settings, wanted = model.config.model, name or model.known.converted_from
        fitting = [own for own in DECODERS if not objections(own, settings) and wanted in (None, own.name)]
        if not fitting:
            fitting = [architecture_of(settings, name)]
        linears, against = model.linears(), []
        for own in fitting:
            tensors = HFTensor.of_model(own, model.spec, model.saved.vocab_size, recipe.grid.dtype)
            left = {link.key.name for t in tensors for link in t.links if recipe.ignores(_module(t.theirs))}
            layout = cls(own, tensors, frozenset(linears.keys() - left), recipe)
            if (reason := layout._objection()) is None:
                layout._check_sizes(linears)
                return layout
            against.append(f"{own.name} {reason}")
        raise CheckpointError(
            f"the model must be one that transformers loads quantized, but {'; '.join(against)}; another "
            "`--architecture` may hold it, as OPTForCausalLM does most of GPT-2's"
        )

    def is_coded(self, tensor: HFTensor) -> bool:
        """Whether a tensor is stored as codes."""
        return all(link.key.name in self.coded for link in tensor.links)

    def _objection(self) -> str | None:
        """The reason why transformers would not load the folder."""
        if not self.recipe.rounds_inputs and self.architecture.name in _OWN_PRODUCTS:
            return "has products of its own, which do not read packed weights; W8A8 would be loaded"
        for tensor in self.tensors:
            if not any(link.key.name in self.coded for link in tensor.links):
                continue
            if not (
                tensor.theirs.endswith(".weight")
                and self.is_coded(tensor)
                and all(map(_in_rows, tensor.links))
            ):
                return f"stores {tensor.theirs} otherwise than as rows of [outputs, inputs]"
            if self.recipe.rounds_inputs and ".experts." in tensor.theirs:
                return "reads experts only if they are packed; take W8, or `--ignore re:.*experts`"
        return None

    def _check_sizes(self, linears: Mapping[str, tuple[int, ...]]) -> None:
        group = self.recipe.grid.group or 1
        wrong = sorted(name for name in self.coded if linears[name][-1] % group)
        if wrong:
            common = math.gcd(group, *(linears[name][-1] for name in wrong))
            raise ConfigError(
                f"`--group-size` must divide the inputs of each weight, but is {group}, and {wrong[0]} has "
                f"{linears[wrong[0]][-1]}; take {common if common > 1 else 0}, or `--ignore` such weights"
            )
        if not self.coded:
            raise ConfigError("`--ignore` must leave weights to quantize, but leaves none; name fewer")

    def skipped(self) -> tuple[str, ...]:
        """The modules whose weights are not quantized, with ``*`` for the numbers of layers and experts."""
        coded = {_module(tensor.theirs) for tensor in self.tensors if self.is_coded(tensor)}
        modules = (_module(tensor.theirs) for tensor in self.tensors)
        short = (re.sub(r"\.\d+(?=\.|$)", ".*", module) for module in modules if module not in coded)
        return tuple(dict.fromkeys(short))

    def quantization_config(self) -> dict[str, Any]:
        """The field of ``config.json`` by which compressed-tensors reads the folder."""
        grid, rounds = self.recipe.grid, self.recipe.rounds_inputs
        own = {"num_bits": grid.bits, "type": "int", "symmetric": True, "dynamic": False}
        own |= {"strategy": "channel" if grid.group is None else "group", "group_size": grid.group}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": own, "output_activations": None}
        group["input_activations"] = inputs if rounds else None
        matrices = [
            t for t in self.tensors if len(t.their_shape) == 2 and t.links[0].key.name.startswith("layers.")
        ]
        left = [_module(tensor.theirs) for tensor in matrices if not self.is_coded(tensor)]
        return {
            "quant_method": "compressed-tensors",
            "format": BYTES if rounds else PACKED,
            "quantization_status": "compressed",
            "ignore": ["lm_head", "embed_out", *left],
            "config_groups": {"group_0": group},
        }

    def stored(self, tensor: HFTensor, blocks: QuantizedSource) -> Sequence[tuple[str, Later]] | None:
        """The tensors that are stored for one, as `write_hf` asks; None for itself."""
        if not self.is_coded(tensor):
            return None
        grid, (rows, columns), module = self.recipe.grid, tensor.their_shape, _module(tensor.theirs)

        def codes() -> QuantizedWeight:
            parts = [(link, blocks.quantized(link.key.name)) for link in tensor.links]
            codes = torch.cat([_rows(link, part.codes) for link, part in parts])
            return QuantizedWeight(
                codes, torch.cat([_rows(link, part.scales) for link, part in parts]), grid.bits
            )

        groups = columns // (grid.group or columns)
        scales = (f"{module}.weight_scale", Later(grid.dtype, (rows, groups), lambda: codes().scales))
        if self.recipe.rounds_inputs:
            return (tensor.theirs, Later(torch.int8, (rows, columns), lambda: codes().codes)), scales
        words = rows, words_of(columns, grid.bits)
        return (
            (f"{module}.weight_packed", Later(torch.int32, words, lambda: codes().packed())),
            scales,
            (f"{module}.weight_shape", Later(torch.int64, (2,), lambda: torch.tensor([rows, columns]))),
        )


class QuantizedSource(Source):
    """The weights of a model as it is quantized, to be read in the order of its blocks; one is kept.

    Args:
        source: the model as it was, with tensors that are in no block.
        blocks: yields the blocks.
    """

    def __init__(self, source: Source, blocks: Iterator[QuantizedBlock]):
        self._source, self._blocks = source, blocks
        self._block = next(blocks)

    @property
    def shapes(self) -> Mapping[Key, tuple[int, ...]]:
        """Logical tensor -> its shape."""
        return self._source.shapes

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts; see `Source`."""
        for part in parts:
            if part.key.kind == WEIGHT:
                part.tensor.copy_(self._at(part.key.name).values[part.key.name][part.box.slices])
            else:
                self._source.read([part])

    def quantized(self, name: str) -> QuantizedWeight:
        """The codes of a weight."""
        return self._at(name).quantized[name]

    def finish(self) -> None:
        """Go through the blocks that nobody asked for."""
        for block in self._blocks:
            self._block = block

    def _at(self, name: str) -> QuantizedBlock:
        while name not in self._block.values:
            self._block = next(self._blocks)
        return self._block


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
