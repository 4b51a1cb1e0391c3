"""Reads and writes the files of torch.distributed.checkpoint, `.metadata` and `*.distcp`, without it.

`.metadata` is a pickle that says which box of which tensor lies at which bytes of which file. Each such range
of bytes is the content of a file of `torch.save`. The pickle names classes of torch. The records below stand
for them in both directions, so that reading calls nothing of torch's, whose unpickler would run any code.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.box import Box, gaps_or_overlaps
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.tensor_file import Later
from megazero.checkpoint.writer import SHARD_BYTES, deal
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.formats.pickles import unreadable
from megazero.regular_file import open_regular

METADATA = ".metadata"
_OBJECTS = "__0_objects.distcp"
_MOST_DIMS = 16


class _StandIn:
    """Stands for an object of torch's; keeps the arguments and fields that a pickle gives it."""

    def __init__(self, *values: object, **fields: object):
        self.values = values
        self.__dict__.update(fields)

    def __getstate__(self) -> object:
        return {name: value for name, value in self.__dict__.items() if name != "values"}

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"values": state})


class _TensorMetadata(_StandIn):
    properties: Any
    size: object
    chunks: Any


class _BytesMetadata(_StandIn): ...


class _ChunkMetadata(_StandIn): ...


class _StorageInfo(_StandIn): ...


class _Metadata(_StandIn): ...


class _Properties(_StandIn):
    """The dtype, layout, requires_grad, memory format and pinning, as a tuple."""

    def __getstate__(self) -> object:
        return self.values


class _MemoryFormat(_StandIn):
    def __reduce__(self) -> Any:
        return _MemoryFormat, self.values


class _MetadataIndex(_StandIn):
    """The name of a tensor and the offset of a box of it."""

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MetadataIndex) and self._key() == other._key()

    def _key(self) -> tuple[object, ...]:
        fields = self.__dict__
        return fields["fqn"], None if fields.get("offset") is None else tuple(fields["offset"])


def _layout(name: object) -> _StandIn:
    return _StandIn(name)


_MODULE = "torch.distributed.checkpoint.metadata"
_NAMES: tuple[tuple[str, str, object], ...] = (
    (_MODULE, "Metadata", _Metadata),
    (_MODULE, "TensorStorageMetadata", _TensorMetadata),
    (_MODULE, "BytesStorageMetadata", _BytesMetadata),
    (_MODULE, "ChunkStorageMetadata", _ChunkMetadata),
    (_MODULE, "MetadataIndex", _MetadataIndex),
    (_MODULE, "TensorProperties", _Properties),
    (_MODULE, "_MEM_FORMAT_ENCODING", _MemoryFormat),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo", _StorageInfo),
    # Not written here, but found in files of other versions of torch and of Megatron.
    (_MODULE, "StorageMeta", _StandIn),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata", _StandIn),
    (_MODULE, "MEM_FORMAT_ENCODING", _MemoryFormat),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties", _Properties),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING", _MemoryFormat),
    ("torch.serialization", "_get_layout", _layout),
    ("torch", "Size", torch.Size),
    ("pathlib", "PosixPath", _StandIn),
    ("pathlib._local", "PosixPath", _StandIn),
    ("collections", "OrderedDict", dict),
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        for known_module, known, stand_in in _NAMES:
            if (module, name) == (known_module, known):
                return stand_in
        value = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(value, torch.dtype):
            return value
        raise CheckpointError(f"names {module}.{name}, which was not called")


class _Pickler(pickle._Pickler):  # the one in Python, which lets a class be called by another name
    def save_global(self, obj: object, name: str | None = None) -> None:
        named = next((entry for entry in _NAMES if entry[2] is obj), None)
        if named is None or obj is torch.Size:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + f"{named[0]}\n{named[1]}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class SavedBox:
    """A box of a tensor: its file, its first byte there, and its length in bytes."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class SavedArray:
    """A tensor: its shape, its dtype and the boxes that cover it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[SavedBox, ...]


def read_metadata(folder: Path) -> Mapping[str, SavedArray]:
    """Read `.metadata`: the tensors of a folder, by name.

    Raises:
        CheckpointError: `.metadata` names a class or function that is not allowed.
        DamagedCheckpointError: `.metadata` cannot be read, or its boxes do not cover the tensors, or are not
            within the files.
    """
    path = folder / METADATA
    try:
        with open_regular(path) as file:
            metadata = _Unpickler(file).load()
        places = metadata.storage_data.items()
        stored = {place._key(): value for place, value in places}
        arrays = {
            str(name): SavedArray(
                _shape(record.size),
                _dtype(record.properties.values[0] if record.properties.values else record.properties.dtype),
                tuple(_box(chunk, stored[name, tuple(chunk.offsets)]) for chunk in record.chunks),
            )
            for name, record in metadata.state_dict_metadata.items()
            if isinstance(record, _TensorMetadata)
        }
        with os.scandir(folder) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    except CheckpointError as error:
        raise CheckpointError(
            f"`{path}` must name only what torch.distributed.checkpoint writes, but {error}; save it with a "
            f"version of torch that megazero knows"
        ) from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise unreadable(path, "be as torch.distributed.checkpoint wrote it", error) from error
    for name, array in arrays.items():
        if wrong := gaps_or_overlaps(array.shape, [saved.box for saved in array.boxes]):
            raise DamagedCheckpointError(f"`{path}` must hold all of {name}, but {wrong}; copy all files")
        for saved in array.boxes:
            start, length, size = saved.start, saved.length, sizes.get(saved.file, 0)
            if not 0 <= start <= start + length <= size or saved.box.numel * array.dtype.itemsize > length:
                raise DamagedCheckpointError(
                    f"`{folder / saved.file}` must hold a tensor {list(saved.box.shape)} of {name} in "
                    f"{length} bytes from {start} on, but has {size} bytes; copy it again"
                )
    return arrays


def _shape(size: Any) -> tuple[int, ...]:
    if len(size) > _MOST_DIMS:
        raise ValueError(f"a tensor has {len(size)} dims")
    return tuple(map(int, size))


def _dtype(value: object) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise ValueError(f"a dtype is {value!r:.40}")
    return value


def _box(chunk: Any, stored: Any) -> SavedBox:
    if "/" in stored.relative_path or stored.relative_path.startswith("."):
        raise ValueError(f"a file is called {stored.relative_path!r}")
    box = Box(_shape(chunk.offsets), _shape(chunk.sizes))
    return SavedBox(box, stored.relative_path, int(stored.offset), int(stored.length))


def read_array(folder: Path, array: SavedArray, box: Box) -> Tensor:
    """Read a box of a tensor, in its stored dtype; only files with a part of it are opened.

    Raises:
        DamagedCheckpointError: the bytes of a part are not such a tensor.
    """
    whole = torch.empty(box.shape, dtype=array.dtype)
    for saved in array.boxes:
        shared = saved.box.overlap(box)
        if shared is None:
            continue
        path = folder / saved.file
        try:
            with open_regular(path) as file:
                file.seek(saved.start)
                part = torch.load(io.BytesIO(file.read(saved.length)), map_location="cpu", weights_only=True)
            if part.dtype != array.dtype:
                raise ValueError(f"it is of {part.dtype}, not {array.dtype}")
            whole[shared.within(box)].copy_(part.view(saved.box.shape)[shared.within(saved.box)])
        except Exception as error:  # a damaged pickle can fail in any way
            what = f"hold a tensor {list(saved.box.shape)} at byte {saved.start}"
            raise unreadable(path, what, error) from error
    return whole


@dataclass(frozen=True)
class ArrayPart:
    """A box of a tensor to write. `.metadata` lists its bytes under each of `names`."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    box: Box
    later: Later


def write_arrays(
    disk: Disk,
    folder: Path,
    parts: Iterable[ArrayPart],
    objects: Iterable[str] = (),
    file_bytes: int = SHARD_BYTES,
) -> dict[str, int]:
    """Write tensors, one part in memory at a time, and `.metadata`; return file name -> size in bytes.

    Args:
        disk: makes all changes to the file system.
        folder: the folder, which has none of these files yet.
        parts: the tensors.
        objects: names under each of which `.metadata` lists the object [None].
        file_bytes: the size at which another file is begun.

    Raises:
        OSError: the disk is full, fails, or may not be written to.
    """
    tensors: dict[str, Any] = {}
    stored: dict[_MetadataIndex, _StorageInfo] = {}
    sizes: dict[str, int] = {}
    runs = deal(parts, lambda part: part.box.numel * part.later.dtype.itemsize, file_bytes)
    for number, run in enumerate(runs):
        name, at = f"__0_{number}.distcp", 0
        with disk.create(folder / name) as file:
            for part in run:
                buffer = io.BytesIO()
                torch.save(part.later.make().contiguous().view(part.box.shape), buffer)
                file.write(buffer.getbuffer())
                for called in part.names:
                    record = tensors.setdefault(called, _record(part))
                    place = _MetadataIndex(
                        fqn=called, offset=torch.Size(part.box.offset), index=len(record.chunks)
                    )
                    extent = _ChunkMetadata(
                        offsets=torch.Size(part.box.offset), sizes=torch.Size(part.box.shape)
                    )
                    record.chunks.append(extent)
                    length = buffer.getbuffer().nbytes
                    stored[place] = _StorageInfo(relative_path=name, offset=at, length=length)
                at += buffer.getbuffer().nbytes
            file.sync()
        sizes[name] = at
    buffer = io.BytesIO()
    torch.save([None], buffer)
    with disk.create(folder / _OBJECTS) as file:
        file.write(buffer.getbuffer())
        file.sync()
    length = sizes[_OBJECTS] = buffer.getbuffer().nbytes
    for called in objects:
        tensors[called] = _BytesMetadata()
        place = _MetadataIndex(fqn=called, offset=None, index=None)
        stored[place] = _StorageInfo(relative_path=_OBJECTS, offset=0, length=length)
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=4).dump(
        _Metadata(state_dict_metadata=tensors, planner_data=None, storage_data=stored, storage_meta=None)
    )
    with disk.create(folder / METADATA) as file:
        file.write(buffer.getbuffer())
        file.sync()
    return sizes


def _record(part: ArrayPart) -> _TensorMetadata:
    facts = (part.later.dtype, torch.strided, False, _MemoryFormat(0), False)
    return _TensorMetadata(properties=_Properties(*facts), size=torch.Size(part.shape), chunks=[])
