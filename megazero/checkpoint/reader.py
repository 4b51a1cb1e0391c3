"""Reads a checkpoint on any layout: each rank fills the boxes that it needs from whichever files hold them.

At most `_STAGED` bytes are held besides the destination. Blocks are hashed as they are read.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.checkpoint.blocks import record_of
from megazero.checkpoint.box import Box
from megazero.checkpoint.directory import Directory, DirectoryInParts, ReaderRank, Wanted, WholeDirectory
from megazero.checkpoint.folder import hidden_folder, iteration_folder
from megazero.checkpoint.lock import FOLDER_FACT
from megazero.checkpoint.manifest import (
    INDEX,
    LARGEST,
    MANIFEST,
    STATE,
    Facts,
    FileEntry,
    Piece,
    json_object,
    piece_name,
    read_manifest,
)
from megazero.checkpoint.part import Key, Part, Source
from megazero.checkpoint.safetensors_header import DTYPES
from megazero.checkpoint.tensor_file import TensorFile, memory_of, read_bytes
from megazero.checkpoint.writer import deal
from megazero.errors import DamagedCheckpointError

_STAGED = 64 << 20
_KEPT_OPEN = 64


class Verify(str, Enum):
    """How much of a checkpoint is checked while it is read.

    FULL: the hash of every block that is read. SIZE: only that all files exist in the right sizes.
    """

    FULL = "full"
    SIZE = "size"


@dataclass(frozen=True)
class _Copy:
    """The box of elements to copy from a piece into a part."""

    part: Part
    piece: Piece
    box: Box


class CheckpointReader:
    """One checkpoint, seen as logical tensors; a `Source`.

    Args:
        folder: its folder, such as ``DIR/iter_0000100``.
        verify: how much is checked while reading.
        rank: this process among those that open the checkpoint together. Each checks the files of its share
            of the parts, so together they check all. By default it is alone.
        state: the content of ``state.json``, if it was read before; used only if it has the hash that the
            manifest lists.

    Attributes:
        manifest: the content of ``manifest.json``.
        directory: the lookup of pieces.
        facts: everything that was saved besides tensors.
        saved_into: the identity of the run's folder that it was saved into; None from earlier versions.
        shapes: logical tensor -> its shape.

    Raises:
        DamagedCheckpointError: a file is missing, has another size, or, if it is read here, was changed.
        CheckpointError: the checkpoint has another format.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        verify: Verify = Verify.FULL,
        rank: ReaderRank | None = None,
        state: bytes | None = None,
    ):
        self.folder = Path(folder)
        self.verify = verify
        self._kept: dict[str, TensorFile] | None = None
        self.manifest = read_manifest(self.folder)
        self._check_name()
        self._check_files(self.manifest.files)
        if wrong := [name for name in (INDEX, STATE) if name not in self.manifest.files]:
            raise DamagedCheckpointError(f"`{self.folder}` must be whole, but {wrong[0]} is not listed")
        self.directory = self._directory(rank or ReaderRank())
        facts = json_object(self._json(STATE, state), self.folder / STATE)
        saved_into = facts.pop(FOLDER_FACT, None)
        self.saved_into = saved_into if isinstance(saved_into, str) else None
        self.facts: Facts = MappingProxyType(facts)
        self._tensors = self.directory.tensors
        self.shapes = MappingProxyType({key: tensor.shape for key, tensor in self._tensors.items()})

    def __enter__(self) -> CheckpointReader:
        """Keep files open from one `read` to the next."""
        self._kept = {}
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._kept or {}).values():
            file.close()
        self._kept = None

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts; see `Source`."""
        copies: dict[str, list[_Copy]] = defaultdict(list)
        parts = list(parts)
        for part in parts:
            tensor = self._tensors[part.key]
            assert tensor.shape == tuple(part.shape), f"{part.key}: {tensor.shape}, not {part.shape}"
        pieces_of = self.directory.find([Wanted(part.key, part.box) for part in parts])
        for part, pieces in zip(parts, pieces_of, strict=True):
            for piece in pieces:
                box = piece.box.overlap(part.box)
                assert box is not None, "`find` returns pieces that overlap"
                copies[piece.file].append(_Copy(part, piece, box))
        for name in sorted(copies):
            with self._reading(name) as file:
                runs = [run for copy in copies[name] for run in _runs(file, copy)]
                file.read_spans((run.start, memory_of(run.target)) for run in runs if run.is_direct)
                staging = sorted((run for run in runs if not run.is_direct), key=lambda run: run.start)
                for batch in deal(staging, lambda run: run.count * run.dtype.itemsize, _STAGED):
                    staged = [torch.empty(run.count, dtype=run.dtype) for run in batch]
                    file.read_spans(
                        (run.start, memory_of(buffer)) for run, buffer in zip(batch, staged, strict=True)
                    )
                    for run, buffer in zip(batch, staged, strict=True):
                        run.target.copy_(buffer.as_strided(run.target.shape, run.strides))

    def tensor(self, key: Key) -> Tensor:
        """Read a whole logical tensor, in its stored dtype."""
        tensor = self._tensors[key]
        whole = torch.empty(tensor.shape, dtype=self.dtype(key))
        self.read([Part.whole(key, whole)])
        return whole

    def dtype(self, key: Key) -> torch.dtype:
        """The dtype in which a tensor is stored."""
        return DTYPES[self._tensors[key].dtype]

    def open(self, name: str) -> TensorFile:
        """Open a tensor file and check that it has the entries that the index lists.

        Raises:
            DamagedCheckpointError: the file lacks an entry, or has it in another shape or dtype.
        """
        file = TensorFile(
            self.folder / name, self.directory.entry(name).record, verify=self.verify is Verify.FULL
        )
        for tensor, piece in self.directory.listed(name):
            entry = file.entries.get(piece_name(tensor.key, tensor.shape, piece.box))
            if entry is None or (entry.dtype, entry.shape) != (self.dtype(tensor.key), piece.shape):
                file.close()
                raise DamagedCheckpointError(
                    f"`{file.path}` must hold {piece.box} of `{tensor.key}` as the index says, but does not"
                )
        return file

    @contextmanager
    def _reading(self, name: str) -> Iterator[TensorFile]:
        if self._kept is None:
            with self.open(name) as file:
                yield file
            return
        file = self._kept.pop(name) if name in self._kept else self.open(name)
        self._kept[name] = file
        if len(self._kept) > _KEPT_OPEN:
            self._kept.pop(next(iter(self._kept))).close()
        yield file

    def _directory(self, rank: ReaderRank) -> Directory:
        content = self._json(INDEX)
        if not self.manifest.parts:
            return WholeDirectory(self.folder, self.manifest, content)
        directory = DirectoryInParts(self.folder, self.manifest, content, rank)
        for number in range(rank.rank, self.manifest.parts, rank.ranks):
            self._check_files(directory.part(number).files)
        return directory

    def _check_name(self) -> None:
        expected = iteration_folder(self.folder.parent, self.manifest.iteration).name
        aside = hidden_folder(self.folder.parent, self.manifest.iteration, "replaced").name
        # A link to a checkpoint may have any name except that of another iteration.
        name = Path(os.path.abspath(self.folder)).name
        name = name if name.startswith("iter_") else self.folder.resolve().name
        if name not in (expected, aside):
            raise DamagedCheckpointError(
                f"`{self.folder}` must be {expected} by its {MANIFEST}, but has another name; rename it back"
            )

    def _check_files(self, files: Mapping[str, FileEntry]) -> None:
        """Raise unless these files exist in the listed sizes."""
        wrong = []
        for name, entry in files.items():
            path = self.folder / name
            try:
                size = path.lstat().st_size
            except OSError as error:
                wrong.append(f"{name} cannot be read ({error.strerror})")
                continue
            if size != entry.size:
                wrong.append(f"{name} has {size} bytes instead of {entry.size}")
        if wrong:
            raise DamagedCheckpointError(f"`{self.folder}` must be whole, but {'; '.join(wrong)}")

    def _json(self, name: str, known: bytes | None = None) -> bytes:
        """The content of a small file, `known` or read; its hash is checked either way."""
        record = self.manifest.files[name].record
        if known is not None and record_of(known) == record:
            return known
        return read_bytes(self.folder / name, record, most=LARGEST)


_: type[Source] = CheckpointReader


@dataclass(frozen=True)
class _FileSpan:
    """Consecutive elements of a file, and the memory to copy some of them into.

    Attributes:
        start: the first byte in the file.
        count: the number of elements to read from there.
        dtype: their dtype.
        strides: the strides of `target`'s elements among them.
        target: memory of a part.
    """

    start: int
    count: int
    dtype: torch.dtype
    strides: tuple[int, ...]
    target: Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the bytes can be read straight into the target."""
        target = self.target
        same_bytes = self.count == target.numel() and target.dtype == self.dtype
        return same_bytes and target.is_cpu and target.is_contiguous()


def _runs(file: TensorFile, copy: _Copy) -> Iterator[_FileSpan]:
    """The spans to read for one copy, each of at most `_STAGED` bytes."""
    entry = file.entries[piece_name(copy.part.key, copy.part.shape, copy.piece.box)]
    size, shape = entry.dtype.itemsize, copy.piece.shape
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))  # of contiguous memory
    for box in _chunks(copy.box, strides, _STAGED // size):
        inside = (o - p for o, p in zip(box.offset, copy.piece.offset, strict=True))
        first = sum(o * stride for o, stride in zip(inside, strides, strict=True))
        last = sum((n - 1) * stride for n, stride in zip(box.shape, strides, strict=True))
        target = copy.part.tensor[box.within(copy.part.box)]
        yield _FileSpan(entry.start + first * size, last + 1, entry.dtype, strides, target)


def _chunks(box: Box, strides: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Cut a box along its first dims into boxes that span at most `limit` elements of strided memory."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(box.shape, strides, strict=True))
    if span <= limit or box.numel == 1:
        yield box
        return
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    rows = max(1, limit // strides[dim])
    for start in range(0, box.shape[dim], rows):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = min(rows, shape[dim] - start)
        yield from _chunks(Box(tuple(offset), tuple(shape)), strides, limit)
