"""The description of a checkpoint that several ranks wrote: an index, and one part for each rank.

No rank gathers what all ranks have written. The index, which every reader reads, lists the logical tensors
and the ranks that wrote pieces of each. The parts say where the pieces lie; a reader opens the few it needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megazero.checkpoint.box import Box
from megazero.checkpoint.manifest import (
    INDEX,
    Count,
    DescriptionModel,
    FileEntry,
    FileName,
    Hash,
    Logical,
    Manifest,
    TensorModel,
    first_stray,
    first_trouble,
    parse,
    unsealed,
)
from megazero.checkpoint.part import Key
from megazero.errors import DamagedCheckpointError

_NUMBERED = re.compile(r"[a-z-]+-([0-9]{5,18})-of-[0-9]{5,18}\.safetensors")


class ListedTensor(TensorModel):
    """One logical tensor in the index of a checkpoint by parts.

    Attributes:
        writers: ranges (start, stop, step) of part numbers; only these parts can hold pieces of the tensor.
    """

    writers: tuple[tuple[Count, Count, Annotated[int, Field(gt=0)]], ...]


class Contents(DescriptionModel):
    """The index of a checkpoint by parts: all its logical tensors."""

    tensors: tuple[ListedTensor, ...]

    def trouble(self) -> str | None:
        """Return the first fault, in words, or None."""
        return first_trouble(self.tensors)


class PartDescription(DescriptionModel):
    """One part: the files that one rank wrote, and the pieces in them.

    Attributes:
        save: the random name of the save, the same in all its parts.
        number: the part's number, which is also in the names of its files.
        files: the files, by name.
        tensors: the logical tensors with pieces in these files, each with these pieces alone.
    """

    save: Hash
    number: Count
    files: dict[FileName, FileEntry]
    tensors: tuple[Logical, ...]

    def trouble(self, contents: Mapping[Key, ListedTensor]) -> str | None:
        """Return the first fault, in words, given the checkpoint's index; None if there is none."""
        for tensor in self.tensors:
            known = contents.get(tensor.key)
            if known is None or (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                return f"`{tensor.key}` is not what {INDEX} says"
            if not any(self.number in range(*run) for run in known.writers):
                return f"`{tensor.key}` is not in this part by {INDEX}"
            for box in (piece.box for piece in tensor.pieces):
                if len(box.offset) == len(tensor.shape) and box.overlap(Box.whole(tensor.shape)) != box:
                    return f"a piece of `{tensor.key}` is not within its shape"
        misnamed = [name for name in self.files if number_of(name) != self.number]
        if misnamed:
            return f"{misnamed[0]!r} has the name of another part's file"
        sizes = {name: entry.size for name, entry in self.files.items()}
        return first_trouble(self.tensors) or first_stray(self.tensors, sizes)


def part_name(number: int, count: int) -> str:
    """The name of the file that describes a part."""
    return f"part-{number + 1:05d}-of-{count:05d}.json"


def number_of(name: str) -> int | None:
    """The number of the part in a tensor file's name; None if the name has none."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) - 1 if match else None


def read_part(folder: Path, manifest: Manifest, number: int) -> PartDescription:
    """Read one part; `PartDescription.trouble` checks it against the index.

    Raises:
        DamagedCheckpointError: the part is missing, changed, ill-formed, or of another save.
    """
    path = folder / part_name(number, manifest.parts)
    part = parse(PartDescription, unsealed(path), path)
    if (part.save, part.number) != (manifest.save, number):
        raise DamagedCheckpointError(
            f"`{path}` must be part {number} of save {manifest.save}, but is part {part.number} of "
            f"{part.save}; use another checkpoint"
        )
    return part
