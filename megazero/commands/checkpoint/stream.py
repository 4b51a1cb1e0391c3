"""Tensors of a checkpoint one after the other, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.reader import CheckpointReader

BATCH_BYTES = 256 << 20
# Computations go over tensors in pieces of this many elements: in float64, 32 MB each.
_ELEMENTS = 4 << 20


def whole_tensors(
    reader: CheckpointReader, keys: Iterable[Key], batch_bytes: int = BATCH_BYTES
) -> Iterator[tuple[Key, Tensor]]:
    """Whole logical tensors in their stored dtypes, in the order of `keys`.

    As many are read at a time as fit into `batch_bytes`, and at least one: if a file's many small tensors
    were read one by one, it would be opened, and its blocks hashed, for each of them.

    Raises:
        DamagedCheckpointError: the stored bytes are not those that were written.
    """
    batch: list[Part] = []
    room = batch_bytes
    for key in keys:
        whole = torch.empty(reader.shapes[key], dtype=reader.dtype(key))
        if batch and whole.nbytes > room:
            yield from _read(reader, batch)
            batch, room = [], batch_bytes
        batch.append(Part.whole(key, whole))
        room -= whole.nbytes
    yield from _read(reader, batch)


def _read(reader: CheckpointReader, batch: list[Part]) -> Iterator[tuple[Key, Tensor]]:
    reader.read(batch)
    for part in batch:
        yield part.key, part.tensor


def in_float64(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of a tensor, flat, a part at a time."""
    for part in tensor.reshape(-1).split(_ELEMENTS):
        yield part.to(torch.float64)
