"""Writes the description of a checkpoint by parts: each rank its part, the first rank the index.

Each rank sends a tally of each tensor. Tallies are merged on their way to the first rank, so that no message
outgrows the list of the model's tensors: the number of elements written, a fingerprint that shows whether the
pieces cover the tensor once, and the part numbers as a few ranges.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypedDict

from megazero.checkpoint.box import PRIME, Box
from megazero.checkpoint.by_parts import Contents, ListedTensor, PartDescription, part_name
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    STATE,
    Facts,
    Logical,
    Piece,
    dump_manifest,
    entries_of,
    sealed,
)
from megazero.checkpoint.part import Key
from megazero.checkpoint.tensor_file import write_bytes
from megazero.checkpoint.writer import Written, WrittenPiece
from megazero.errors import CheckpointError

_MOST_RUNS = 8


class Tally(TypedDict):
    """The sum, over one or more parts, of the pieces of one tensor; sent as JSON.

    `elements` and `fingerprint` are sums over pieces; `writers` are ranges (start, stop, step) of part
    numbers.
    """

    name: str
    kind: str
    dtype: str
    shape: list[int]
    elements: int
    fingerprint: int
    writers: list[list[int]]


def write_part(disk: Disk, folder: Path, written: Written, save: str, number: int, count: int) -> list[Tally]:
    """Write the part that describes one rank's files, and return its tallies.

    Args:
        folder: the partial checkpoint's folder.
        written: the files of this rank there.
        save: the random name of this save.
        number, count: the part's number, from 0, and the number of parts.

    Raises:
        OSError: the disk is full, fails, or may not be written to.
    """
    part, tallies = describe(written, save, number)
    write_bytes(disk, folder / part_name(number, count), sealed(part.model_dump_json()))
    return tallies


def describe(written: Written, save: str, number: int) -> tuple[PartDescription, list[Tally]]:
    """The part that describes one rank's files, and its tallies."""
    by_key: dict[Key, list[WrittenPiece]] = {}
    for entry in written.entries:
        by_key.setdefault(entry.key, []).append(entry)
    tensors = tuple(
        Logical(
            name=key.name,
            kind=key.kind,
            dtype=entries[0].dtype,
            shape=entries[0].shape,
            pieces=tuple(
                Piece(file=e.file, offset=e.box.offset, shape=e.box.shape) for e in entries if e.box.numel
            ),
        )
        for key, entries in by_key.items()
    )
    part = PartDescription(save=save, number=number, files=entries_of(written.files), tensors=tensors)
    return part, [_tally(tensor, number) for tensor in tensors]


def _tally(tensor: Logical, number: int) -> Tally:
    boxes = [piece.box for piece in tensor.pieces]
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "elements": sum(box.numel for box in boxes),
        "fingerprint": sum(box.fingerprint for box in boxes) % PRIME,
        "writers": [[number, number + 1, 1]],
    }


def fold(some: Sequence[Tally], later: Sequence[Tally]) -> list[Tally]:
    """Merge the tallies of some parts with those of later parts.

    Tallies that differ in shape or dtype are kept apart, and `write_contents` refuses them.
    """
    tallies = {_identity(tally): tally for tally in some}
    for tally in later:
        known = tallies.get(_identity(tally))
        if known is not None:
            tally = {
                **known,
                "elements": known["elements"] + tally["elements"],
                "fingerprint": (known["fingerprint"] + tally["fingerprint"]) % PRIME,
                "writers": joined([*known["writers"], *tally["writers"]]),
            }
        tallies[_identity(tally)] = tally
    return list(tallies.values())


def _identity(tally: Tally) -> tuple[object, ...]:
    return tally["name"], tally["kind"], tally["dtype"], *tally["shape"]


def joined(runs: Iterable[Sequence[int]]) -> list[list[int]]:
    """Merge ascending ranges (start, stop, step) into fewer with the same numbers.

    If more than `_MOST_RUNS` are left, one range from the first number to the last replaces them: readers
    may then open parts without the tensor, but the index stays small.
    """
    fewer: list[range] = []
    for run in (range(*numbers) for numbers in runs):
        last = fewer[-1] if fewer else run
        gap = run[0] - last[-1]
        if fewer and all(numbers.step == gap for numbers in (last, run) if len(numbers) > 1):
            fewer[-1] = range(last[0], run[-1] + gap, gap)
        else:
            fewer.append(run)
    if len(fewer) > _MOST_RUNS:
        fewer = [range(fewer[0][0], fewer[-1][-1] + 1)]
    return [[run.start, run.stop, run.step] for run in fewer]


def write_contents(
    disk: Disk,
    folder: Path,
    iteration: int,
    tallies: Sequence[Tally],
    facts: Facts,
    save: str,
    parts: int,
) -> None:
    """Write the index, the facts and finally the manifest; then the folder is complete and synced.

    Args:
        folder: the partial checkpoint's folder.
        iteration: the iteration after which it was saved.
        tallies: the merged tallies of all parts.
        facts: the content of ``state.json``.
        save: the random name of this save.
        parts: the number of parts.

    Raises:
        CheckpointError: the pieces do not cover the tensors exactly once.
        OSError: the disk is full, fails, or may not be written to.
    """
    known: dict[Key, Tally] = {}
    for tally in tallies:
        key = Key(tally["name"], tally["kind"])
        first = known.setdefault(key, tally)
        if first is not tally:
            raise CheckpointError(
                f"`{key}` must be the same on all ranks, but has {first['shape']} {first['dtype']} and "
                f"{tally['shape']} {tally['dtype']}"
            )
    for key, tally in known.items():
        if wrong := _uncovered(tally):
            raise CheckpointError(
                f"what the ranks wrote must make whole tensors, but the pieces of `{key}` do not cover it: "
                f"{wrong}"
            )
    contents = Contents(
        tensors=tuple(
            ListedTensor(
                name=tally["name"],
                kind=tally["kind"],
                dtype=tally["dtype"],
                shape=tuple(tally["shape"]),
                writers=tuple((start, stop, step) for start, stop, step in tally["writers"]),
            )
            for tally in tallies
        )
    )
    files = {
        INDEX: write_bytes(disk, folder / INDEX, contents.model_dump_json().encode()),
        STATE: write_bytes(disk, folder / STATE, json.dumps(facts, indent=1).encode()),
    }
    write_bytes(disk, folder / MANIFEST, dump_manifest(iteration, files, save, parts))
    disk.sync_folder(folder)


def _uncovered(tally: Tally) -> str | None:
    """Say why the pieces do not cover a tensor exactly once; None if they do."""
    whole = Box.whole(tally["shape"])
    if tally["elements"] != whole.numel:
        return f"{tally['elements']} of {whole.numel} elements are there"
    if whole.numel and tally["fingerprint"] != whole.fingerprint:
        return "some elements are there twice, and others are not"
    return None
