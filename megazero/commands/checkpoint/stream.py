"""Read the tensors of a checkpoint one after the other, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.tensor_file import Later

BATCH_BYTES = 256 << 20
_ELEMENTS = 4 << 20  # of a piece that is computed on: 32 MB in float64


def whole_tensors(
    reader: CheckpointReader, keys: Iterable[Key], batch_bytes: int = BATCH_BYTES
) -> Iterator[tuple[Key, Tensor]]:
    """Yield whole logical tensors in their stored dtypes, in the order of `keys`.

    Tensors are read in batches of at most `batch_bytes`, or of one larger tensor, because each read opens a
    file and hashes its blocks anew.

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


def changed_tensors(
    reader: CheckpointReader,
    keys: Sequence[Key],
    form: Callable[[Key], tuple[torch.dtype, tuple[int, ...]]],
    change: Callable[[Key, Tensor], Tensor],
) -> Iterator[tuple[Key, Later]]:
    """Yield tensors for `write_checkpoint`, which are read and changed when they are written.

    Args:
        reader: the checkpoint that is read.
        keys: the tensors, in the order in which they will be written.
        form: returns the dtype and the shape of a changed tensor.
        change: changes a tensor.
    """
    stream = whole_tensors(reader, keys)

    def made(expected: Key) -> Tensor:
        key, tensor = next(stream)
        assert key == expected, f"{key} was read, but {expected} is to be written"
        return change(key, tensor)

    for key in keys:
        yield key, Later(*form(key), partial(made, key))


def in_float64(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements of a tensor in flat float64 pieces."""
    for part in tensor.reshape(-1).split(_ELEMENTS):
        yield part.to(torch.float64)
