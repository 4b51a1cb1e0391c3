"""`write_weights`: a file of whole weights, written tensor by tensor as they are made."""

from __future__ import annotations

import math
import mmap
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.tensor_file import Later, write_tensors
from megazero.errors import CheckpointError


def write_weights(path: Path, tensors: Sequence[tuple[str, Later]], names: Mapping[str, str]) -> None:
    """Write a file, which appears whole by one rename; one tensor is in memory at a time.

    Args:
        path: safetensors if its name ends so, where each name has a copy; or else torch's format, bit for bit
            what `torch.save` writes of a dictionary in which tied weights are one tensor.
        tensors: what makes the distinct tensors, which happens once and in this order.
        names: name in the file -> name in `tensors`; a tensor's first name comes in the order of `tensors`.

    Raises:
        CheckpointError: the format cannot hold the tensors, or the file cannot be written.
        OSError: the system refuses.
    """
    disk, aside = Disk(), path.with_name(f".{path.name}.partial")
    disk.make_parents(path.parent)
    if aside.exists():  # left by a process that was killed
        disk.remove(aside)
    disk.make_folder(aside)
    try:
        # The archive of torch has the file's name in it, so that a folder is hidden and not the file.
        if path.suffix == ".safetensors":
            write_tensors(disk, aside / path.name, _copies(tensors, names), hashed=False)
        else:
            _write_archive(aside / path.name, tensors, names)
        disk.rename(aside / path.name, path)
    except (RuntimeError, ValueError) as error:  # of torch's writer, of safetensors
        raise CheckpointError(f"`{path}` must be written, but cannot be: {error}") from error
    finally:
        disk.remove(aside)
    disk.sync_folder(path.parent)


def _copies(tensors: Sequence[tuple[str, Later]], names: Mapping[str, str]) -> Iterator[tuple[str, Later]]:
    """All names, those of one tensor after each other; only the first one makes the tensor."""
    last: list[Tensor] = []

    def make(later: Later) -> Tensor:
        last[:] = [later.make()]
        return last[0]

    for own, later in tensors:
        first, *others = [name for name, tensor in names.items() if tensor == own]
        yield first, Later(later.dtype, later.shape, partial(make, later))
        for name in others:
            yield name, Later(later.dtype, later.shape, lambda: last[0])


def _write_archive(path: Path, tensors: Sequence[tuple[str, Later]], names: Mapping[str, str]) -> None:
    # The dictionary that is pickled has tensors in memory that nobody touches, which takes none.
    largest: dict[torch.dtype, int] = {}
    for _, later in tensors:
        largest[later.dtype] = max(later.dtype.itemsize * math.prod(later.shape), largest.get(later.dtype, 1))
    memory = {dtype: mmap.mmap(-1, size) for dtype, size in largest.items()}
    untouched = {name: _in_memory(memory[later.dtype], later) for name, later in tensors}
    state = {name: untouched[own] for name, own in names.items()}
    with torch.serialization._open_zipfile_writer(str(path)) as writer:
        archive = _Archive(writer, iter(tensors))
        torch.serialization._save(state, archive, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _in_memory(memory: mmap.mmap, later: Later) -> Tensor:
    if size := math.prod(later.shape):
        return torch.frombuffer(memory, dtype=later.dtype, count=size).view(later.shape)
    return torch.empty(later.shape, dtype=later.dtype)


class _Archive:
    """torch's archive, with the memory of tensors that are made when it is written."""

    def __init__(self, writer: torch._C.PyTorchFileWriter, tensors: Iterator[tuple[str, Later]]):
        self.writer = writer
        self.tensors = tensors

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Write a record; instead of untouched memory, that of the next tensor."""
        if isinstance(data, torch.UntypedStorage):
            _, later = next(self.tensors)
            tensor = later.make().detach().cpu().contiguous()
            data = tensor.untyped_storage()
            if data.nbytes() != size:  # a view of a larger tensor
                data = tensor.clone().untyped_storage()
        self.writer.write_record(name, data, size)
