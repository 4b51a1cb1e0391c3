"""Files of tensors in the safetensors format, hashed while they are written and checked while they are read.

The safetensors library reads these files, and its files can be read here, but it cannot do this work: it
writes a file in one call, from all tensors at once and in its own order, and it reads through mapped memory,
where a bad sector kills the process instead of raising an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.blocks import BLOCK, BlockFile, BlockHasher, FileRecord
from megazero.checkpoint.disk import Disk, File
from megazero.checkpoint.safetensors_header import (
    LARGEST_HEADER,
    LENGTH_BYTES,
    HeaderEntry,
    decode_header,
    encode_header,
)
from megazero.errors import CheckpointError

# Bytes are hashed and written in pieces of this size, so that they are still cached when they are written.
# Larger writes were slower: the page cache then looks for larger runs of free memory.
_PIECE = 512 << 10
# A tensor smaller than this is copied into a buffer, which is cheaper than a system call of its own.
_SMALL = 64 << 10


@dataclass(frozen=True)
class Later:
    """A tensor that is made when its turn to be written comes, and dropped afterwards.

    Attributes:
        dtype, shape: dtype and shape of the tensor that `make` returns.
        make: makes the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, as a view of bytes."""
    # A single element is contiguous whatever its strides are, and `view` would keep them.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    # numpy knows neither bfloat16 nor 8-bit floats.
    return flat.view(torch.uint8).numpy().data


def narrowed(name: object, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to another dtype; `name` is for messages.

    Raises:
        CheckpointError: a finite value overflows.
    """
    made = tensor.to(dtype)
    if dtype != tensor.dtype and (made.isinf() & ~tensor.isinf()).any():
        raise CheckpointError(
            f"`{name}` must fit into {dtype}, but has magnitudes up to {tensor.abs().max():g}; "
            "take bf16 or fp32"
        )
    return made


def write_tensors(
    disk: Disk,
    path: Path,
    tensors: Iterable[tuple[str, Tensor | Later]],
    *,
    metadata: Mapping[str, str] | None = None,
    hashed: bool = True,
    block_size: int = BLOCK,
) -> FileRecord:
    """Write a new file of named tensors, in their order; it is on the medium on return.

    A contiguous CPU tensor is written from its own memory; others are copied, one at a time. After a failure
    a partial file is left.

    Args:
        disk: makes the file.
        path: the file, which must not exist yet.
        tensors: tensors with any strides and device, in dtypes of safetensors.
        metadata: the strings of ``__metadata__``.
        hashed: whether to compute the record's hashes.
        block_size: bytes per hash.

    Raises:
        ValueError: a name occurs twice, the format lacks a dtype, or a `Later` made something else.
        OSError: the system refuses.
    """
    named = list(tensors)
    header = encode_header(((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named), metadata)
    with disk.create(path) as file:
        stream = _Stream(file, block_size, hashed)
        stream.write(header)
        for name, tensor in named:
            stream.write(memory_of(_on_host(name, tensor)))
        return stream.finish()


def write_bytes(disk: Disk, path: Path, data: bytes, *, block_size: int = BLOCK) -> FileRecord:
    """Write a new file; it is on the medium on return.

    Raises:
        OSError: the system refuses.
    """
    with disk.create(path) as file:
        stream = _Stream(file, block_size, hashed=True)
        stream.write(data)
        return stream.finish()


def read_bytes(
    path: Path,
    record: FileRecord | None = None,
    *,
    verify: bool = True,
    block_size: int = BLOCK,
    most: int | None = None,
) -> bytes:
    """Read a whole file.

    Args:
        path, record, verify, block_size: as for `BlockFile`.
        most: the largest number of bytes that the file may have.

    Raises:
        DamagedCheckpointError: the file is missing, too large, cannot be read or is not as recorded.
    """
    with BlockFile(path, record, verify=verify, block_size=block_size) as file:
        if most is not None and file.size > most:
            raise file.damage(f"its {file.size} bytes are more than the {most} that it may have")
        data = bytearray(file.size)
        file.read_into(memoryview(data), 0)
        return bytes(data)


def _on_host(name: str, tensor: Tensor | Later) -> Tensor:
    if isinstance(tensor, Later):
        made = tensor.make()
        if made.dtype != tensor.dtype or made.shape != tensor.shape:
            raise ValueError(
                f"`{name}` must be {tensor.dtype} {list(tensor.shape)}, but is {made.dtype} "
                f"{list(made.shape)}"
            )
        tensor = made
    return tensor.detach().cpu().contiguous()


class _Stream:
    """Writes a file in pieces, each hashed right before, while it is in the cache.

    Pieces end at multiples of `_PIECE` in the file. Large tensors are written from their own memory; small
    ones are collected in a buffer, so that thousands of them take few system calls.
    """

    def __init__(self, file: File, block_size: int, hashed: bool):
        self._file = file
        self._hasher = BlockHasher(block_size) if hashed else None
        self._buffer = memoryview(bytearray(_PIECE))
        self._filled = 0
        self._size = 0

    def write(self, data: bytes | memoryview) -> None:
        data = memoryview(data)
        while data:
            piece = data[: _PIECE - self._size % _PIECE]
            data = data[len(piece) :]
            self._size += len(piece)
            if len(piece) >= _SMALL:
                self._flush()
                self._emit(piece)
                continue
            self._buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            if self._size % _PIECE == 0:
                self._flush()

    def finish(self) -> FileRecord:
        self._flush()
        self._file.sync()
        return self._hasher.record() if self._hasher else FileRecord(self._size, ())

    def _flush(self) -> None:
        if self._filled:
            self._emit(self._buffer[: self._filled])
            self._filled = 0

    def _emit(self, piece: memoryview) -> None:
        if self._hasher:
            self._hasher.update(piece)
        self._file.write(piece)


class TensorFile(BlockFile):
    """A safetensors file that is open for reading, by one thread at a time.

    Attributes:
        path: the file.
        entries: name -> dtype, shape and bytes of each tensor, in file order.
        metadata: the strings of ``__metadata__``.

    Args:
        path: a regular file, not a link.
        record: the expected size and hashes; None checks the header alone.
        verify: compare hashes too, not only size and header.
        block_size: bytes per hash.

    Raises:
        DamagedCheckpointError: in all methods: the file is missing, cannot be read or is not as recorded, or
            its header does not follow the format exactly.
    """

    def __init__(
        self, path: Path, record: FileRecord | None = None, *, verify: bool = True, block_size: int = BLOCK
    ):
        super().__init__(path, record, verify=verify, block_size=block_size)
        try:
            self.entries, self.metadata = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            KeyError: there is no tensor of this name.
        """
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(memory_of(tensor), entry.start)
        return tensor

    def _read_header(self) -> tuple[Mapping[str, HeaderEntry], Mapping[str, str]]:
        if self.size < LENGTH_BYTES:
            raise self.damage(f"{self.size} bytes are not a safetensors file")
        length = bytearray(LENGTH_BYTES)
        self.read_into(memoryview(length), 0)
        size = int.from_bytes(length, "little")
        data_bytes = self.size - LENGTH_BYTES - size
        if size > LARGEST_HEADER or data_bytes < 0:
            raise self.damage(f"a header of {size} bytes does not fit into it")
        text = bytearray(size)
        self.read_into(memoryview(text), LENGTH_BYTES)
        try:
            return decode_header(bytes(text), data_bytes)
        except ValueError as error:
            raise self.damage(f"its header is not a safetensors header: {error}") from error
