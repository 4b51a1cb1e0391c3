"""The tensors of a local Hugging Face folder: one safetensors file, or shards with an index."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.checkpoint.tensor_file import TensorFile, memory_of
from megazero.checkpoint.writer import NAMES as INDEX
from megazero.errors import CheckpointError
from megazero.formats.hf.architecture import TensorLike
from megazero.formats.hf.config_json import read_json

SINGLE = "model.safetensors"
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")
_MOST_NAMED = 8


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, from byte `start` on; nothing is read before `rows` or `read_rows`."""

    file: TensorFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def in_rows(self) -> StoredTensor:
        """The tensor as a matrix, with all dims but the last merged into rows."""
        if len(self.shape) < 3:
            return self
        return replace(self, shape=(math.prod(self.shape[:-1]), self.shape[-1]))

    def cut(self, first: int, stop: int) -> StoredTensor:
        """Rows `first` to `stop`, as a tensor of their own."""
        start = self.start + first * math.prod(self.shape[1:]) * self.dtype.itemsize
        return replace(self, shape=(stop - first, *self.shape[1:]), start=start)

    def rows(self, rows: slice) -> Tensor:
        """Read rows, given as indexes of the first dim, into new memory."""
        tensor = torch.empty((rows.stop - rows.start, *self.shape[1:]), dtype=self.dtype)
        self.read_rows(rows, tensor)
        return tensor

    def read_rows(self, rows: slice, memory: Tensor) -> None:
        """Read rows into contiguous CPU memory of the tensor's dtype."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        self.file.read_into(memory_of(memory), self.start + rows.start * row_bytes)


_: type[TensorLike] = StoredTensor


class TensorFolder:
    """All tensors of a folder, by name. Reads headers only; files stay open until `close`.

    Raises:
        CheckpointError: there are no safetensors files, or the index and its files disagree.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        with ExitStack() as files:
            self.tensors: Mapping[str, StoredTensor] = MappingProxyType(self._open(files))
            self._files = files.pop_all()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _open(self, files: ExitStack) -> dict[str, StoredTensor]:
        # If a folder has both, transformers takes the single file.
        if (self.folder / SINGLE).exists():
            return self._tensors_of(files, SINGLE)
        if (self.folder / INDEX).exists():
            return self._sharded(files)
        pickles = [name for name in _PICKLES if (self.folder / name).exists()]
        if pickles:
            raise CheckpointError(
                f"`{self.folder}` must hold {SINGLE}, but holds {pickles[0]}, which can run code when it is "
                f"opened; if you trust it, load it with transformers and `save_pretrained` it again"
            )
        raise CheckpointError(
            f"`{self.folder}` must hold {SINGLE} or {INDEX}, but has neither; give a folder that "
            f"`save_pretrained` wrote"
        )

    def _sharded(self, files: ExitStack) -> dict[str, StoredTensor]:
        path = self.folder / INDEX
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"`{path}`: `weight_map` must map tensors to files, but does not")
        for name in sorted(set(weight_map.values())):
            if Path(name).name != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
                raise CheckpointError(
                    f"`{path}`: `weight_map` must name files beside it, but names {name!r:.200}"
                )
            # `Path.exists` raises for a name that is too long; this returns False.
            if not os.path.exists(self.folder / name):
                raise CheckpointError(
                    f"`{path}` must name files that are there, but {name:.200} is missing; fetch it again"
                )
        stored: dict[str, StoredTensor] = {}
        for name in sorted(set(weight_map.values())):
            tensors = self._tensors_of(files, name)
            claimed = {tensor for tensor, file in weight_map.items() if file == name}
            if wrong := claimed.symmetric_difference(tensors):
                raise CheckpointError(
                    f"`{path}` must say what is in {name}, but they differ in {named(wrong)}; fetch both "
                    "again"
                )
            stored |= tensors
        return stored

    def _tensors_of(self, files: ExitStack, name: str) -> dict[str, StoredTensor]:
        # In download caches, files are links.
        file = files.enter_context(TensorFile((self.folder / name).resolve()))
        return {
            tensor: StoredTensor(file, tensor, entry.dtype, entry.shape, entry.start)
            for tensor, entry in file.entries.items()
        }


def named(names: Iterable[str]) -> str:
    """The first few names, and the number of the others, for messages."""
    ordered = sorted(names)
    # Names come from the file, and control characters must not reach a terminal.
    first = [name[:200] if name.isprintable() else ascii(name)[:200] for name in ordered[:_MOST_NAMED]]
    more = len(ordered) - len(first)
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
