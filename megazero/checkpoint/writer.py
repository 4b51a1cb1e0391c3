"""Writes a checkpoint's tensor files, and their description if one process writes it."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megazero.checkpoint.blocks import FileRecord
from megazero.checkpoint.box import Box
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import hidden_folder, publish, recover
from megazero.checkpoint.lock import FOLDER_FACT, WriterLock
from megazero.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    STATE,
    Facts,
    Index,
    Logical,
    Piece,
    dump_manifest,
    piece_name,
)
from megazero.checkpoint.part import WEIGHT, Key, Part, Source
from megazero.checkpoint.remote.disk import disk_for
from megazero.checkpoint.remote.mirror import in_mirror, local_path
from megazero.checkpoint.safetensors_header import DTYPES, NAME_OF_DTYPE
from megazero.checkpoint.tensor_file import Later, write_bytes, write_tensors
from megazero.errors import CheckpointError
from megazero.host_memory import available_memory

Item = TypeVar("Item")

SHARD_BYTES = 5 << 30
NAMES = "model.safetensors.index.json"
"""Hugging Face's index of weights and files, with which its libraries can open a checkpoint's weights."""


@dataclass(frozen=True)
class WrittenPiece:
    """One piece as it was written: the tensor, the box of it, and the file."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    box: Box
    file: str


@dataclass(frozen=True)
class Written:
    """The files and pieces that one rank wrote."""

    files: Mapping[str, FileRecord]
    entries: Sequence[WrittenPiece]

    def __add__(self, other: Written) -> Written:
        return Written({**self.files, **other.files}, [*self.entries, *other.entries])


def write_parts(
    disk: Disk, folder: Path, parts: Iterable[Part], number: int, count: int, beside: str = ""
) -> Written:
    """Write parts to two files, one for weights and one for the rest; none that would be empty.

    Args:
        folder: the partial checkpoint's folder.
        parts: the parts, with tensors on any device.
        number, count: the rank's number, from 0, and the number of ranks, for the names.
        beside: a suffix for the names, if the rank writes further files.

    Raises:
        OSError: the disk is full, fails, or may not be written to.
    """
    sorts: dict[str, list[Part]] = {"model": [], "optimizer": []}
    for part in parts:
        if part.box.numel or part.box == Box.whole(part.shape):
            sorts[sort_of(part.key)].append(part)
    files: dict[str, FileRecord] = {}
    entries: list[WrittenPiece] = []
    for sort, sorted_parts in sorts.items():
        if not sorted_parts:
            continue
        name = file_name(sort + beside, number, count)
        named = ((piece_name(p.key, p.shape, p.box), p.tensor) for p in sorted_parts)
        files[name] = write_tensors(disk, folder / name, named)
        entries += [
            WrittenPiece(p.key, NAME_OF_DTYPE[p.tensor.dtype], p.shape, p.box, name) for p in sorted_parts
        ]
    return Written(files, entries)


def sort_of(key: Key) -> str:
    """The sort of file that a tensor is written to."""
    return "model" if key.kind == WEIGHT else "optimizer"


def file_name(sort: str, number: int, count: int) -> str:
    """The name of a tensor file, numbered in Hugging Face's manner."""
    return f"{sort}-{number + 1:05d}-of-{count:05d}.safetensors"


def write_description(
    disk: Disk,
    folder: Path,
    iteration: int,
    written: Iterable[Written],
    facts: Facts,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Write the index, the facts and finally the manifest; then the folder is complete and synced.

    Args:
        folder: the partial checkpoint's folder.
        iteration: the iteration after which it was saved.
        written: the files of each rank.
        facts: the content of ``state.json``.
        beside: further files for other programs, by name; hashed and checked like the others.

    Raises:
        CheckpointError: the pieces do not cover the tensors exactly once.
        OSError: the disk is full, fails, or may not be written to.
    """
    files: dict[str, FileRecord] = {}
    tensors: dict[Key, tuple[WrittenPiece, list[Piece]]] = {}
    for of_rank in written:
        files |= of_rank.files
        for entry in of_rank.entries:
            first, pieces = tensors.setdefault(entry.key, (entry, []))
            if (entry.shape, entry.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"`{entry.key}` must be the same on all ranks, but has {first.shape} {first.dtype} and "
                    f"{entry.shape} {entry.dtype}"
                )
            if entry.box.numel:
                pieces.append(Piece(file=entry.file, offset=entry.box.offset, shape=entry.box.shape))
    index = Index(
        tensors=tuple(
            Logical(name=key.name, kind=key.kind, dtype=first.dtype, shape=first.shape, pieces=tuple(pieces))
            for key, (first, pieces) in tensors.items()
        )
    )
    if wrong := index.trouble({name: record.size for name, record in files.items()}):
        raise CheckpointError(f"what the ranks wrote must make whole tensors, but {wrong}")
    files[INDEX] = write_bytes(disk, folder / INDEX, index.model_dump_json().encode())
    files[STATE] = write_bytes(disk, folder / STATE, json.dumps(facts, indent=1).encode())
    for name, content in (beside or {}).items():
        files[name] = write_bytes(disk, folder / name, content)
    write_bytes(disk, folder / MANIFEST, dump_manifest(iteration, files))
    disk.sync_folder(folder)


def write_checkpoint(
    directory: str | Path,
    iteration: int,
    tensors: Iterable[tuple[Key, Later]],
    facts: Facts,
    *,
    disk: Disk | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint from one process, one tensor in memory at a time. After a failure nothing is left.

    Each tensor is whole in one file, which `NAMES` lists, so other programs can open the weights by name.

    Args:
        directory: the run's folder.
        iteration: the checkpoint's iteration.
        tensors: whole logical tensors; each is made when its turn comes.
        facts: the content of ``state.json``.
        disk: makes all changes to the file system.
        shard_bytes: the size at which another file is begun.

    Raises:
        CheckpointError: another job writes there, the disk cannot be written, or there is no room on it for
            the checkpoint or in memory for the largest tensor.
    """
    directory = local_path(directory)
    disk = disk or disk_for(directory)
    shards = _shards(tensors, shard_bytes)
    try:
        _check_room(directory, [size_of(item) for shard in shards.values() for item in shard])
        disk.make_parents(directory)
        lock = WriterLock(directory, disk)
        try:
            recover(disk, directory)
            folder = hidden_folder(directory, iteration, "partial")
            disk.make_folder(folder)
            try:
                written = [_write_shard(disk, folder / name, shard) for name, shard in shards.items()]
                names = {NAMES: _weight_map(written)}
                write_description(
                    disk, folder, iteration, written, {**facts, FOLDER_FACT: lock.identity}, names
                )
                lock.check()
            except Exception:
                # The first failure says more than a failure to clean up after it.
                with contextlib.suppress(OSError):
                    disk.remove(folder)
                raise
            return publish(disk, directory, iteration)
        finally:
            lock.release()
    except OSError as error:
        raise CheckpointError(f"`{directory}` must be written, but cannot be: {error}") from error


def _check_room(directory: Path, sizes: Sequence[int]) -> None:
    """Raise CheckpointError if disk or memory has no room for tensors of these sizes in bytes."""
    above = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    room = sys.maxsize if in_mirror(directory) else shutil.disk_usage(above).free
    for where, what, needed, free in (
        (f"the disk of `{directory}`", "the checkpoint", sum(sizes), room),
        ("memory", "the largest tensor", max(sizes, default=0), available_memory()),
    ):
        if needed > free:
            raise CheckpointError(
                f"{where} must have {needed / 2**30:,.1f} GiB free for {what}, but has {free / 2**30:,.1f}; "
                "make room, or write less"
            )


def _write_shard(disk: Disk, path: Path, shard: Sequence[tuple[Key, Later]]) -> Written:
    record = write_tensors(disk, path, ((str(key), later) for key, later in shard))
    entries = [
        WrittenPiece(key, NAME_OF_DTYPE[later.dtype], tuple(later.shape), Box.whole(later.shape), path.name)
        for key, later in shard
    ]
    return Written({path.name: record}, entries)


def _weight_map(written: Iterable[Written]) -> bytes:
    weights = [entry for shard in written for entry in shard.entries if entry.key.kind == WEIGHT]
    total = sum(entry.box.numel * DTYPES[entry.dtype].itemsize for entry in weights)
    places = {str(entry.key): entry.file for entry in weights}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1).encode()


def _shards(tensors: Iterable[tuple[Key, Later]], shard_bytes: int) -> dict[str, list[tuple[Key, Later]]]:
    """File name -> its tensors, of one sort and at most `shard_bytes` in all, or one larger tensor."""
    sorts: dict[str, list[tuple[Key, Later]]] = {"model": [], "optimizer": []}
    for item in tensors:
        sorts[sort_of(item[0])].append(item)
    return {
        file_name(sort, number, len(shards)): shard
        for sort, items in sorts.items()
        for shards in [deal(items, size_of, shard_bytes)]
        for number, shard in enumerate(shards)
    }


def size_of(item: tuple[Key, Later]) -> int:
    """The size in bytes of a tensor that is still to be made."""
    return Box.whole(item[1].shape).numel * item[1].dtype.itemsize


def later_weights(source: Source) -> Iterator[tuple[Key, Later]]:
    """All tensors of a source, in fp32, each read when its turn comes."""

    def make(key: Key, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape)
        source.read([Part.whole(key, tensor)])
        return tensor

    for key, shape in source.shapes.items():
        yield key, Later(torch.float32, shape, partial(make, key, shape))


def deal(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> list[list[Item]]:
    """Split items, in order, into lists of at most `most` bytes each, or of a single larger item."""
    lists: list[list[Item]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if not lists or size > room:
            lists.append([])
            room = most
        lists[-1].append(item)
        room -= size
    return lists
