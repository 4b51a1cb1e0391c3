"""The JSON files that describe a checkpoint, and their checks.

``manifest.json`` is written last, so a folder without it is not a checkpoint. In format 2, which one process
writes, it lists every file with its size and the hashes of its blocks, and ``index.json`` says which box of
which logical tensor lies in which file. In format 3 every rank describes its own files, see `by_parts`. The
first line of a manifest or part is the hash of the rest. These files may come from anyone, so sizes, names
and boxes are checked before they are used.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from megazero.checkpoint.blocks import BLOCK, FileRecord
from megazero.checkpoint.box import Box, gaps_or_overlaps
from megazero.checkpoint.part import Key
from megazero.checkpoint.safetensors_header import DTYPES, distinct
from megazero.checkpoint.tensor_file import read_bytes
from megazero.errors import CheckpointError, DamagedCheckpointError

FORMATS: Final = (2, 3)
MANIFEST = "manifest.json"
INDEX = "index.json"
STATE = "state.json"
_FIRST_LINE = re.compile(rb'\{"checksum": "([0-9a-f]{16})",\n')
# No genuine description is larger; the manifest for 2 TB of files has about 10 MB.
LARGEST = 1 << 30

Facts = Mapping[str, Any]
"""The content of ``state.json``: whatever the run saves besides tensors."""

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]


class DescriptionModel(BaseModel):
    """Base of the models of descriptions: strict, and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


_Model = TypeVar("_Model", bound=BaseModel)


class FileEntry(DescriptionModel):
    """Size in bytes and the hash of each block of a file."""

    size: Count
    blocks: tuple[Hash, ...]

    @model_validator(mode="after")
    def _complete(self) -> FileEntry:
        if len(self.blocks) != -(-self.size // BLOCK):
            raise ValueError(f"{len(self.blocks)} hashes do not fit {self.size} bytes")
        return self

    @property
    def record(self) -> FileRecord:
        """The entry as a `FileRecord`."""
        return FileRecord(self.size, self.blocks)


class Manifest(DescriptionModel):
    """The content of ``manifest.json``.

    Attributes:
        format: the checkpoint's format, see the module.
        iteration: the iteration after which it was saved.
        block_size: bytes per hash.
        files: all files by name, except the manifest and the files that parts describe.
        save: a random name of this save, repeated in its parts; None in format 2.
        parts: the number of parts; 0 in format 2.
    """

    format: Literal[2, 3]
    iteration: Count
    block_size: Literal[4194304]
    files: dict[FileName, FileEntry]
    save: Hash | None = None
    parts: Annotated[int, Field(ge=0, le=1 << 20)] = 0

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if MANIFEST in self.files:
            raise ValueError(f"{MANIFEST} cannot be one of the files")
        if not (self.format == 3) == (self.parts > 0) == (self.save is not None):
            raise ValueError(f"format {self.format} does not fit {self.parts} parts of save {self.save}")
        return self


class Piece(DescriptionModel):
    """A box of a logical tensor that lies in one file."""

    file: FileName
    offset: tuple[Count, ...]
    shape: tuple[Count, ...]

    @property
    def box(self) -> Box:
        """The box of the tensor."""
        return Box(self.offset, self.shape)


class TensorModel(DescriptionModel):
    """Name, dtype and shape of one logical tensor.

    Attributes:
        name, kind: its `Key`.
        dtype: the dtype as safetensors names it, such as F32.
        shape: the shape, without padding of the vocabulary.
    """

    name: Annotated[str, StringConstraints(min_length=1, max_length=10_000)]
    kind: Annotated[str, StringConstraints(min_length=1, max_length=1_000)]
    dtype: Annotated[str, StringConstraints(max_length=20)]
    shape: tuple[Count, ...]

    @property
    def key(self) -> Key:
        """The key of the tensor."""
        return Key(self.name, self.kind)


class Logical(TensorModel):
    """One logical tensor and its pieces, which in a whole description cover `shape` exactly once."""

    pieces: tuple[Piece, ...]


class Index(DescriptionModel):
    """The content of ``index.json`` in format 2: all logical tensors of a checkpoint."""

    tensors: tuple[Logical, ...]

    def trouble(self, sizes: Mapping[str, int]) -> str | None:
        """Return the first fault, in words, given the files' sizes in bytes; None if there is none."""
        return (
            first_trouble(self.tensors)
            or first_stray(self.tensors, sizes)
            or next(filter(None, map(_uncovered, self.tensors)), None)
        )


def first_trouble(tensors: Iterable[TensorModel]) -> str | None:
    """The first fault of the tensors themselves, in words; None if there is none."""
    seen: set[Key] = set()
    for tensor in tensors:
        if tensor.key in seen:
            return f"`{tensor.key}` occurs twice"
        seen.add(tensor.key)
        if tensor.dtype not in DTYPES:
            return f"`{tensor.key}` has the unknown dtype {tensor.dtype!r}"
        # torch computes strides as if a dim of size 0 had size 1, and they must not overflow.
        if math.prod(max(size, 1) for size in tensor.shape) >= 1 << 60:
            return f"`{tensor.key}` has a shape beyond all memory"
    return None


def first_stray(tensors: Iterable[Logical], sizes: Mapping[str, int]) -> str | None:
    """The first piece that does not fit its tensor or its file, in words; None if all fit."""
    for tensor in tensors:
        for piece in tensor.pieces:
            if not len(piece.offset) == len(piece.shape) == len(tensor.shape):
                return f"a piece of `{tensor.key}` has a different number of dims"
            if piece.file not in sizes or not piece.file.endswith(".safetensors"):
                return f"`{tensor.key}` lies in {piece.file!r}, which the manifest does not list"
            # A reader allocates memory for the piece before it opens the file.
            if piece.box.numel * DTYPES[tensor.dtype].itemsize > sizes[piece.file]:
                return f"a piece of `{tensor.key}` is larger than its file"
    return None


def _uncovered(tensor: Logical) -> str | None:
    wrong = gaps_or_overlaps(tensor.shape, (piece.box for piece in tensor.pieces))
    return f"the pieces of `{tensor.key}` do not cover it: {wrong}" if wrong else None


def piece_name(key: Key, shape: tuple[int, ...], box: Box) -> str:
    """The name of a piece in its tensor file."""
    return str(key) if box == Box.whole(shape) else f"{key}{box}"


def dump_manifest(
    iteration: int, files: Mapping[str, FileRecord], save: str | None = None, parts: int = 0
) -> bytes:
    """The bytes of ``manifest.json``; `save` and `parts` are given in format 3."""
    manifest = Manifest(
        format=3 if parts else 2,
        iteration=iteration,
        block_size=BLOCK,
        files=entries_of(files),
        save=save,
        parts=parts,
    )
    return sealed(manifest.model_dump_json(indent=1, exclude_defaults=True))


def entries_of(files: Mapping[str, FileRecord]) -> dict[str, FileEntry]:
    """The entries of files in a description, by name."""
    return {name: FileEntry(size=record.size, blocks=record.blocks) for name, record in sorted(files.items())}


def sealed(text: str) -> bytes:
    """Put the hash of a JSON object into its first line."""
    rest = text.encode()[1:].removeprefix(b"\n") + b"\n"
    return b'{"checksum": "' + xxhash.xxh3_64_hexdigest(rest).encode() + b'",\n' + rest


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``manifest.json``.

    Raises:
        DamagedCheckpointError: the file is missing, changed or ill-formed.
        CheckpointError: the checkpoint has another format.
    """
    path = folder / MANIFEST
    rest = unsealed(path)
    if (written := json_object(rest, path).get("format")) not in FORMATS:
        raise CheckpointError(
            f"`{path}` must be of format {' or '.join(map(str, FORMATS))}, but is of {written!r}; use the "
            "version that wrote it"
        )
    return parse(Manifest, rest, path)


def unsealed(path: Path) -> bytes:
    """Read a file that `sealed` made, check its hash, and return the JSON without it.

    Raises:
        DamagedCheckpointError: the file is missing or changed.
    """
    data = read_bytes(path, most=LARGEST)
    first = _FIRST_LINE.match(data)
    if first is None or xxhash.xxh3_64_hexdigest(data[first.end() :]).encode() != first[1]:
        raise DamagedCheckpointError(
            f"`{path}` must be as it was written, but its checksum differs; use another checkpoint"
        )
    return b"{" + data[first.end() :]


def parse(model: type[_Model], data: bytes, path: Path) -> _Model:
    """Validate JSON; `path` is for messages.

    Raises:
        DamagedCheckpointError: the JSON does not fit the model; the first reason is named.
    """
    json_object(data, path)  # refuses equal keys, of which pydantic would take the last
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise DamagedCheckpointError(
            f"`{path}` must describe a checkpoint, but {where or 'it'}: {first['msg']}"
        ) from None


def json_object(data: bytes, path: Path) -> dict[str, object]:
    """Parse a JSON object without equal keys; `path` is for messages.

    Raises:
        DamagedCheckpointError: the data are something else.
    """
    try:
        value = json.loads(data, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"`{path}` must hold JSON, but does not: {error}") from error
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"`{path}` must hold an object, but holds a {type(value).__name__}")
    return value
