"""Lookup of pieces: which files hold a box of a tensor, for both forms of a description."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from megazero.checkpoint.box import Box, gaps_or_overlaps
from megazero.checkpoint.by_parts import Contents, PartDescription, number_of, part_name, read_part
from megazero.checkpoint.manifest import (
    INDEX,
    FileEntry,
    Index,
    Logical,
    Manifest,
    Piece,
    TensorModel,
    parse,
)
from megazero.checkpoint.part import Key
from megazero.errors import DamagedCheckpointError
from megazero.mpu.context import ParallelContext

_KEPT_PARTS = 64


@dataclass(frozen=True)
class ReaderRank:
    """One of the processes that open a checkpoint together.

    Attributes:
        rank, ranks: its number, and the number of processes.
        within_stage: its place among the ranks of its pipeline stage, from 0 to 1.
    """

    rank: int = 0
    ranks: int = 1
    within_stage: float = 0.0

    @classmethod
    def of(cls, context: ParallelContext) -> ReaderRank:
        """This rank of a job whose ranks all open the checkpoint."""
        stage = context.groups["stage"]
        return cls(context.rank, context.world_size, stage.rank / stage.size)


@dataclass(frozen=True)
class Wanted:
    """A box of a logical tensor to look up."""

    key: Key
    box: Box


class Directory(Protocol):
    """The description of one checkpoint.

    Attributes:
        tensors: the logical tensors, by key.
    """

    tensors: Mapping[Key, TensorModel]

    def find(self, wanted: Sequence[Wanted]) -> list[list[Piece]]:
        """The pieces that overlap each box.

        Raises:
            DamagedCheckpointError: the pieces do not cover a box exactly once, or a part is damaged.
        """

    def entry(self, name: str) -> FileEntry:
        """Size and hashes of a tensor file that `find` has named."""

    def listed(self, name: str) -> Sequence[tuple[TensorModel, Piece]]:
        """The pieces in a tensor file, each with its tensor."""

    def files(self) -> Mapping[str, FileEntry]:
        """All files of the checkpoint except the parts, which are all read for this."""

    def whole(self) -> Index:
        """All tensors with all their pieces; reads the whole description.

        Raises:
            DamagedCheckpointError: the pieces do not cover the tensors, or a part is damaged.
        """


class WholeDirectory(Directory):
    """The description that one process wrote: a manifest and one index.

    Args:
        folder, manifest: the checkpoint's.
        content: the bytes of its index.

    Raises:
        DamagedCheckpointError: the index is ill-formed or does not fit the files.
    """

    def __init__(self, folder: Path, manifest: Manifest, content: bytes):
        self._index = _checked(parse(Index, content, folder / INDEX), manifest.files, folder)
        self._manifest = manifest
        self._tensors = {tensor.key: tensor for tensor in self._index.tensors}
        self.tensors: Mapping[Key, TensorModel] = MappingProxyType(self._tensors)

    def find(self, wanted: Sequence[Wanted]) -> list[list[Piece]]:
        return [_overlapping(self._tensors[one.key], one.box) for one in wanted]

    def entry(self, name: str) -> FileEntry:
        return self._manifest.files[name]

    def listed(self, name: str) -> Sequence[tuple[TensorModel, Piece]]:
        return self._listed.get(name, ())

    def files(self) -> Mapping[str, FileEntry]:
        return self._manifest.files

    def whole(self) -> Index:
        return self._index

    @cached_property
    def _listed(self) -> Mapping[str, list[tuple[TensorModel, Piece]]]:
        listed: dict[str, list[tuple[TensorModel, Piece]]] = defaultdict(list)
        for tensor in self._index.tensors:
            for piece in tensor.pieces:
                listed[piece.file].append((tensor, piece))
        return listed


class DirectoryInParts(Directory):
    """The description that several ranks wrote by parts, each read when it is needed.

    Args:
        folder, manifest: the checkpoint's.
        content: the bytes of its index.
        rank: this process among those that read; the search begins at the part of the same place.

    Raises:
        DamagedCheckpointError: the index is ill-formed.
    """

    def __init__(self, folder: Path, manifest: Manifest, content: bytes, rank: ReaderRank):
        contents = parse(Contents, content, folder / INDEX)
        if wrong := contents.trouble():
            raise _misfit(folder / INDEX, wrong)
        self._folder, self._manifest, self._rank = folder, manifest, rank
        self._listed = {tensor.key: tensor for tensor in contents.tensors}
        self.tensors: Mapping[Key, TensorModel] = MappingProxyType(self._listed)
        self._parts: dict[int, PartDescription] = {}

    def find(self, wanted: Sequence[Wanted]) -> list[list[Piece]]:
        pieces: list[list[Piece]] = [[] for _ in wanted]
        missing = {number: one.box.numel for number, one in enumerate(wanted) if one.box.numel}
        for part in self._nearest_first([wanted[number].key for number in missing]):
            writers = {number: self._listed[wanted[number].key].writers for number in missing}
            here = [number for number, runs in writers.items() if any(part in range(*run) for run in runs)]
            tensors = {tensor.key: tensor for tensor in self.part(part).tensors} if here else {}
            for number in here:
                if (tensor := tensors.get(wanted[number].key)) is None:
                    continue
                overlapping = _overlapping(tensor, wanted[number].box)
                pieces[number] += overlapping
                missing[number] -= sum(_common(piece, wanted[number].box).numel for piece in overlapping)
                if missing[number] <= 0:
                    del missing[number]
            if not missing:
                break
        for one, these in zip(wanted, pieces, strict=True):
            inside = [_common(piece, one.box).shifted(-o for o in one.box.offset) for piece in these]
            if wrong := gaps_or_overlaps(one.box.shape, inside):
                raise _misfit(
                    self._folder / INDEX, f"the pieces of `{one.key}` do not cover {one.box}: {wrong}"
                )
        return pieces

    def entry(self, name: str) -> FileEntry:
        return self._part_of(name).files[name]

    def listed(self, name: str) -> Sequence[tuple[TensorModel, Piece]]:
        tensors = self._part_of(name).tensors
        return [(tensor, piece) for tensor in tensors for piece in tensor.pieces if piece.file == name]

    def files(self) -> Mapping[str, FileEntry]:
        parts = map(self.part, range(self._manifest.parts))
        return {
            **self._manifest.files,
            **{name: entry for part in parts for name, entry in part.files.items()},
        }

    def whole(self) -> Index:
        pieces: dict[Key, list[Piece]] = defaultdict(list)
        for number in range(self._manifest.parts):
            for tensor in self.part(number).tensors:
                pieces[tensor.key] += tensor.pieces
        tensors = (
            Logical(name=t.name, kind=t.kind, dtype=t.dtype, shape=t.shape, pieces=tuple(pieces[key]))
            for key, t in self.tensors.items()
        )
        return _checked(Index(tensors=tuple(tensors)), self.files(), self._folder)

    def part(self, number: int) -> PartDescription:
        """One part, read or cached; the `_KEPT_PARTS` parts used last are cached.

        Raises:
            DamagedCheckpointError: the part is damaged, of another save, or does not fit the index.
        """
        part = self._parts.pop(number, None)
        if part is None:
            part = read_part(self._folder, self._manifest, number)
            if wrong := part.trouble(self._listed):
                raise _misfit(self._folder / part_name(number, self._manifest.parts), wrong)
        self._parts[number] = part
        if len(self._parts) > _KEPT_PARTS:
            del self._parts[next(iter(self._parts))]
        return part

    def _part_of(self, name: str) -> PartDescription:
        number = number_of(name)
        assert number is not None, "the names of a part's files are checked when it is read"
        return self.part(number)

    def _nearest_first(self, keys: Iterable[Key]) -> Iterator[int]:
        """All part numbers, the most likely to hold these tensors first, then by distance from those.

        On the same layout that is the part of the reader's own rank; on another, the part at the reader's
        place within the pipeline stage that wrote the tensor.
        """
        near = {self._rank.rank * self._manifest.parts // self._rank.ranks}
        for key in keys:
            runs = [range(*run) for run in self._listed[key].writers]
            first = min((run[0] for run in runs if run), default=0)
            last = max((run[-1] for run in runs if run), default=0)
            near.add(first + int(self._rank.within_stage * (last + 1 - first)))
        passed: set[int] = set()
        for distance in range(self._manifest.parts):
            numbers = {place + shift for place in near for shift in (-distance, distance)}
            for number in sorted(numbers - passed):
                if 0 <= number < self._manifest.parts:
                    passed.add(number)
                    yield number


def _overlapping(tensor: Logical, box: Box) -> list[Piece]:
    return [piece for piece in tensor.pieces if (common := piece.box.overlap(box)) and common.numel]


def _common(piece: Piece, box: Box) -> Box:
    common = piece.box.overlap(box)
    assert common is not None, "only pieces that overlap are kept"
    return common


def _checked(index: Index, files: Mapping[str, FileEntry], folder: Path) -> Index:
    if wrong := index.trouble({name: entry.size for name, entry in files.items()}):
        raise _misfit(folder / INDEX, wrong)
    return index


def _misfit(path: Path, wrong: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"`{path}` must fit the other files, but {wrong}")
