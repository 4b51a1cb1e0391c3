"""The one object that says which checkpoints of a run are visible, and which job may save there.

It is only ever created or replaced by conditional writes, so each change happens whole or not at all, and a
job that has lost the folder can make none. All functions raise StorageError if the store does not answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from megazero.errors import CheckpointError, StorageError
from megazero.storage.objects import MissingObjectError, Objects

INDEX = "checkpoints.json"
LATEST = "latest_checkpointed_iteration.txt"
_CONTENTS = "contents.json"
_PLAIN = re.compile("(iter_[0-9]{7,18})/manifest.json")


@dataclass(frozen=True)
class RunIndex:
    """The content of a run's index.

    Attributes:
        folder: the identity of the run's folder; see `checkpoint/lock.py`.
        owner, holder: a random name of the job that saves there, and its process; empty without one.
        latest: the iteration of the newest checkpoint.
        checkpoints: name of each visible checkpoint -> the name below which its objects are.
        files: name of each other file of the run -> the tag of its object.
        changes: the number of times that this was replaced.
    """

    folder: str = ""
    owner: str = ""
    holder: str = ""
    latest: int | None = None
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    changes: int = 0

    def dump(self) -> bytes:
        """The object's content."""
        return json.dumps({"format": 1, **asdict(self)}, indent=1).encode()


@dataclass(frozen=True)
class Contents:
    """The files of one checkpoint: name -> size.

    A file of at least `chunk` bytes is cut into objects of that size, whose names have their number appended.
    So each object is put by one request, and no killed job leaves a part of one.
    """

    chunk: int
    files: Mapping[str, int]


def read_index(objects: Objects) -> tuple[RunIndex | None, str]:
    """Read a run's index and its tag; None if nothing was saved there. CheckpointError if it is no index.

    Without an index, a copy of a local run's folder has the checkpoints that a listing shows.
    """
    try:
        content, tag = objects.read(INDEX)
    except MissingObjectError:
        return _copied(objects), ""
    try:
        facts = json.loads(content)
        if facts.pop("format") != 1:
            raise ValueError
        return RunIndex(**facts), tag
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(
            f"`{objects.url / INDEX}` must be an index of checkpoints that this version knows, but is not; "
            "use the version that wrote it"
        ) from None


def _copied(objects: Objects) -> RunIndex | None:
    """The index of a copied folder: of what it holds, if the file of the newest checkpoint is there."""
    try:
        latest = objects.read(LATEST)[0].decode(errors="replace").strip()
    except MissingObjectError:
        return None
    names = [match[1] for item in objects.names() if (match := _PLAIN.fullmatch(item.name))]
    return RunIndex(latest=int(latest) if latest.isdecimal() else None, checkpoints={n: n for n in names})


def read_contents(objects: Objects, data: str) -> Contents:
    """The files below a name; of a copied checkpoint, those that a listing shows; none if it is damaged."""
    try:
        facts = json.loads(objects.read(f"{data}/{_CONTENTS}")[0])
        return Contents(int(facts["chunk"]), {str(n): int(size) for n, size in facts["files"].items()})
    except MissingObjectError:
        sizes = {item.name.removeprefix(f"{data}/"): item.size for item in objects.names(data)}
        return Contents(1 << 62, {name: size for name, size in sizes.items() if "/" not in name})
    except (ValueError, TypeError, KeyError, AttributeError):
        return Contents(1 << 62, {})


def write_contents(objects: Objects, data: str, chunk: int) -> None:
    """List the files that lie below a name, and write the list there. StorageError if a part is missing."""
    pieces = sizes_of_pieces(objects, data)
    files = {name: sum(sizes.values()) for name, sizes in pieces.items()}
    for name, sizes in pieces.items():
        count = -(-files[name] // chunk) if -1 not in sizes else 1
        full = all(sizes.get(number) == chunk for number in range(count - 1))
        if len(sizes) != count or not full:
            raise StorageError(f"`{objects.url / data / name}` must be whole, but parts of it are missing.")
    content = json.dumps({"chunk": chunk, "files": files}, indent=1).encode()
    objects.put(f"{data}/{_CONTENTS}", content)  # of this save alone


def sizes_of_pieces(objects: Objects, data: str) -> dict[str, dict[int, int]]:
    """The files below a name, by a listing: name -> number of a part, or -1 for the whole -> its size."""
    pieces: dict[str, dict[int, int]] = {}
    for item in objects.names(data):
        name, number = _piece(item.name.removeprefix(f"{data}/"))
        pieces.setdefault(name, {})[number] = item.size
    return pieces


def piece_name(name: str, number: int) -> str:
    """The name of a part of a large file."""
    return f"{name}.{number:06d}"


def _piece(name: str) -> tuple[str, int]:
    """The file that an object is of, and its number there; -1 for the whole."""
    match = re.fullmatch(r"(.+)\.([0-9]{6})", name)
    return (match[1], int(match[2])) if match else (name, -1)
