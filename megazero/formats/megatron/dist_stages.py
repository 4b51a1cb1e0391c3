"""Megatron-Core's distributed checkpoints, seen as one stage on one rank.

Tensors in them are whole, whichever ranks wrote them. Equal layers, and experts, are stacked: one tensor has
all of them, along dims before its own. Optimizer state has the name of its weight. Versions before 0.14
flatten it: the last dim runs through the elements of one tensor-parallel part, and the dims before number
these parts.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import WEIGHT
from megazero.errors import CheckpointError
from megazero.formats.megatron.dialects import core_name
from megazero.formats.megatron.dist_file import SavedArray, read_array, read_metadata
from megazero.formats.megatron.folder import MegatronFiles
from megazero.formats.megatron.inventory import IN_USE, Inventory, SavedTensor, TensorRecord
from megazero.formats.megatron.settings import with_grouped_mlp
from megazero.formats.megatron.stages import Header, Opened, read_header
from megazero.formats.megatron.weights import Lazy, Weights
from megazero.regular_file import read_regular_text

_OF_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.(\w+)\.)?")
_KINDS = MappingProxyType({"param": WEIGHT, "fp32_param": WEIGHT})
_STACKED_LAYERS = re.compile(r"((?:encoder|decoder)\.layers\.)(?!\d)(.*)")
_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)experts\.(?!\d)(.*)")
_ONE_EXPERT = re.compile(r"(.*\.mlp\.experts\.)experts\.(\d+\..*)")
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")


@dataclass(frozen=True)
class _StackedTensor:
    """One tensor within saved ones: those that it joins along its first dim (gate and value of a gated MLP),
    each [*stacked, *shape] or flattened, and its index `at` in the stacked dims."""

    arrays: Mapping[str, SavedArray]
    at: tuple[int, ...]
    stacked: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The tensor's shape; if a saved one does not fit, an impossible shape, which `check` will refuse."""
        for array in self.arrays.values():
            own = array.shape[len(self.stacked) :]
            cuts = own[:-1]
            flattened = len(cuts) == len(self.shape) and math.prod(own) == math.prod(self.shape)
            flattened &= all(cut and size % cut == 0 for size, cut in zip(self.shape, cuts, strict=False))
            if array.shape[: len(self.stacked)] != self.stacked or not (own == self.shape or flattened):
                return (*array.shape, 0)
        return (self.shape[0] * len(self.arrays), *self.shape[1:]) if self.shape else ()


class DistStages(Opened):
    """The tensors of a distributed checkpoint, each read on access.

    Args:
        files: the files.
        inert: classes whose objects are not needed, by full name.

    Attributes:
        headers: the header in `common.pt`.
        inventories: kind -> the tensors of this kind, by Core's names.

    Raises:
        CheckpointError: the checkpoint is not in the torch_dist format.
        DamagedCheckpointError: a file cannot be read.
    """

    def __init__(self, files: MegatronFiles, inert: Iterable[str] = ()):
        self.files = files
        _check_form(files.folder)
        self.headers: dict[Path, Header] = {files.ranks[0]: read_header(files.ranks[0], inert)}
        arrays = read_metadata(files.folder)
        self._slots: dict[str, _StackedTensor] = {}
        arguments = self.headers[files.ranks[0]].arguments or {}
        # `GroupedMLP` flattened the state of its transposed weights: it is passed over, and reported missing.
        transposed = with_grouped_mlp(arguments)
        inventories: dict[str, dict[str, TensorRecord]] = defaultdict(dict)
        for name, array in sorted(arrays.items()):
            match = _OF_OPTIMIZER.match(name)
            if match and match[1] is None:
                continue  # optimizer state in a form without the names of weights
            plain, kind = (name[match.end() :], match[1]) if match else (name, IN_USE)
            kind = _KINDS.get(kind, kind)
            model = arrays[plain].shape if plain in arrays else array.shape
            if transposed and ".experts." in plain and len(array.shape) > len(model):
                continue
            for own, slot in _separate(plain, array, model):
                called = core_name(own)
                if called is not None:
                    place = f"{kind}/{called}"
                    before = self._slots.get(place, slot)
                    self._slots[place] = slot = replace(slot, arrays={**before.arrays, **slot.arrays})
                    saved = SavedTensor(0, "model", place)
                    inventories[kind][called] = TensorRecord(saved, (slot.record_shape,), (array.dtype,))
        self.inventories: Mapping[str, Inventory] = inventories

    def close(self) -> None:
        """Keep no file open."""

    def chunks(self, stage: int) -> Mapping[str, tuple[Weights, ...]]:
        """The only model chunk, of the only rank."""
        return {
            "model": (
                Lazy({place: partial(_whole, self.files.folder, s) for place, s in self._slots.items()}),
            )
        }


def _whole(folder: Path, slot: _StackedTensor) -> Tensor:
    halves = [_read(folder, slot, array) for _, array in sorted(slot.arrays.items())]
    return torch.cat(halves) if len(halves) > 1 else halves[0]


def _read(folder: Path, slot: _StackedTensor, array: SavedArray) -> Tensor:
    depth, shape = len(slot.at), slot.shape
    own = array.shape[depth:]
    tensor = read_array(folder, array, Box((*slot.at, *[0] * len(own)), (*[1] * depth, *own))).view(own)
    if own == shape:
        return tensor
    # Flattened: the last dim is one part, the others number the parts along each dim of the tensor.
    cuts = own[:-1]
    parts = tensor.view(*cuts, *(n // cut for n, cut in zip(shape, cuts, strict=True)))
    order = [
        dim for pair in zip(range(len(cuts)), range(len(cuts), 2 * len(cuts)), strict=True) for dim in pair
    ]
    return parts.permute(order).reshape(shape)


def _separate(name: str, array: SavedArray, model: tuple[int, ...]) -> Iterator[tuple[str, _StackedTensor]]:
    """The tensors that a saved one stacks; `model` is the shape of the weight whose state it is."""
    layers, experts = _STACKED_LAYERS.fullmatch(name), _STACKED_EXPERTS.fullmatch(name)
    depth = (layers is not None) + (experts is not None)
    if len(model) < depth or 0 in model:  # ill-formed or empty: nothing is stacked
        yield name, _StackedTensor({"": array}, (), (), array.shape)
        return
    for at in product(*map(range, model[:depth])):
        own, half = name, ""
        if layers is not None:
            own = f"{layers[1]}{at[0]}.{layers[2]}"
        if experts is not None:
            own = _STACKED_EXPERTS.sub(rf"\g<1>local_experts.{at[-1]}.\2", own)
        own = _ONE_EXPERT.sub(r"\1local_experts.\2", own)
        # With `singleton_local_shards`, gate (w) and value (v) of a gated MLP are saved as two tensors.
        if halves := _HALF.fullmatch(own):
            own, half = halves[1], "01"["wv".index(halves[2])]
        yield own, _StackedTensor({half: array}, at, model[:depth], model[depth:])


def _check_form(folder: Path) -> None:
    """Refuse formats other than torch_dist.

    Raises:
        CheckpointError: another program or another backend wrote the folder.
    """
    path = folder / "metadata.json"
    try:
        content = json.loads(read_regular_text(path))
        backend = content["sharded_backend"] if isinstance(content, dict) else content
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"`{path}` must say how Megatron's checkpoint is stored, but cannot be read: {error}; "
            f"save it with Megatron-LM's --ckpt-format torch_dist"
        ) from error
    if backend != "torch_dist":
        raise CheckpointError(
            f"`{folder}` must be in `torch_dist` format, but is in {backend!r}; save it with "
            f"Megatron-LM's --ckpt-format torch_dist"
        )
