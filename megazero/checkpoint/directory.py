"""Where the tensors of a checkpoint lie, whether its description is whole or by parts."""

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
class Share:
    """The place of a reader among those that open a checkpoint together, each for its own share.

    Attributes:
        rank, ranks: its number, and how many there are.
        within_stage: its place among the ranks of its pipeline stage, as a fraction.
    """

    rank: int = 0
    ranks: int = 1
    within_stage: float = 0.0

    @classmethod
    def of(cls, context: ParallelContext) -> Share:
        """The place of a rank of a job, all ranks of which open the checkpoint."""
        stage = context.groups["stage"]
        return cls(context.rank, context.world_size, stage.rank / stage.size)


@dataclass(frozen=True)
class Wanted:
    """A box of a logical tensor that somebody looks for."""

    key: Key
    box: Box


class Directory(Protocol):
    """The description of one checkpoint.

    Attributes:
        tensors: the facts about each logical tensor.
    """

    tensors: Mapping[Key, TensorModel]

    def find(self, wanted: Sequence[Wanted]) -> list[list[Piece]]:
        """The pieces that overlap each box, which they cover exactly once.

        Raises:
            DamagedCheckpointError: they do not, or a part of the description is damaged.
        """

    def entry(self, name: str) -> FileEntry:
        """The facts about a tensor file in which `find` has found a piece."""

    def listed(self, name: str) -> Sequence[tuple[TensorModel, Piece]]:
        """The pieces in a tensor file, and the tensors that they are of."""

    def files(self) -> Mapping[str, FileEntry]:
        """All files of the checkpoint but those of the description by parts; reads all of that."""

    def whole(self) -> Index:
        """All tensors with all their pieces; reads all of the description.

        Raises:
            DamagedCheckpointError: the pieces do not cover the tensors, or a part is damaged.
        """


class WholeDirectory(Directory):
    """A description in two files, of what one process wrote.

    Args:
        folder, manifest: those of the checkpoint.
        content: the content of its index.

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
    """A description by parts, of what several ranks wrote; parts are read when they are needed.

    Args:
        folder, manifest: those of the checkpoint.
        content: the content of its index.
        share: the reader's place among those that open the checkpoint together, from which it follows which
            parts most likely hold what it looks for. Others follow by their distance.

    Raises:
        DamagedCheckpointError: the index is ill-formed.
    """

    def __init__(self, folder: Path, manifest: Manifest, content: bytes, share: Share):
        contents = parse(Contents, content, folder / INDEX)
        if wrong := contents.trouble():
            raise _misfit(folder / INDEX, wrong)
        self._folder, self._manifest, self._share = folder, manifest, share
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
        """One part; of those that were read, the latest are kept.

        Raises:
            DamagedCheckpointError: it is damaged, of another save, or does not fit the index.
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
        assert number is not None, "names of files in parts are checked when these are read"
        return self.part(number)

    def _nearest_first(self, keys: Iterable[Key]) -> Iterator[int]:
        """Numbers of parts, from those on that most likely hold these tensors.

        These are the one with the reader's number, or the one at its place in the stage that wrote a tensor.
        """
        near = {self._share.rank * self._manifest.parts // self._share.ranks}
        for key in keys:
            runs = [range(*run) for run in self._listed[key].writers]
            first, last = (
                min((run[0] for run in runs if run), default=0),
                max((run[-1] for run in runs if run), default=0),
            )
            near.add(first + int(self._share.within_stage * (last + 1 - first)))
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
