"""The local mirror of a run's folder at a URL.

A checkpoint that is visible there is a folder here, with an empty file of the right size in place of each of
its files. Whoever opens a file fetches it first, once per host. The mirror keeps what it has fetched while
that fits into half of the disk's free room; what was used longest ago goes first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megazero.checkpoint.remote.index import (
    LATEST,
    RunIndex,
    piece_name,
    read_contents,
    read_index,
)
from megazero.checkpoint.remote.place import mirror_root, url_of
from megazero.errors import CheckpointError, DamagedCheckpointError, StorageError
from megazero.file_lock import try_lock
from megazero.storage.objects import MissingObjectError, Objects

VISIBLE = re.compile("iter_[0-9]{7,18}")
_STATE = ".mirror.json"
_LOCK = ".mirror.lock"
_UNFETCHED = stat.S_IWUSR  # the mode of a file that is still to be fetched: nobody may read it
_FETCHED = stat.S_IRUSR | stat.S_IWUSR
_PIECE = 32 << 20
_THREADS = 4


def open_objects(folder: Path) -> Objects:
    """The objects that a folder mirrors."""
    return Objects(url_of(folder))


def refresh(folder: Path) -> None:
    """Bring the mirror of a run's folder up to date.

    Raises:
        CheckpointError: its URL cannot be read.
    """
    with reading():
        objects = open_objects(folder)
        with locked(folder):
            materialize(folder, objects, read_index(objects)[0] or RunIndex())


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turn errors of the store into those of a checkpoint; an object that is gone is damage."""
    try:
        yield
    except MissingObjectError as error:
        raise DamagedCheckpointError(str(error)) from None
    except StorageError as error:
        raise CheckpointError(str(error)) from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock on a mirror."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try_lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


@dataclass
class _State:
    """What a mirror shows: the folder's identity, its checkpoints with their places and files with tags."""

    folder: str
    checkpoints: dict[str, tuple[str, int]]
    files: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> _State:
        try:
            facts = json.loads((folder / _STATE).read_text())
            return cls(**facts)
        except (OSError, ValueError, TypeError):
            return cls("", {}, {})

    def write(self, folder: Path) -> None:
        aside = folder / f"{_STATE}.new"
        aside.write_text(json.dumps(self.__dict__))
        os.replace(aside, folder / _STATE)


def materialize(folder: Path, objects: Objects, index: RunIndex) -> None:
    """Let a mirror show what an index says; the caller holds the mirror's lock.

    Files that this host's job has written since it last put them stay, unless another has put them.
    """
    state = _State.read(folder)
    if state.folder and state.folder != index.folder:  # another run's
        for path in folder.iterdir():
            if path.name == ".lock" or not path.name.startswith("."):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        state = _State("", {}, {})
    there = {path.name for path in folder.iterdir() if VISIBLE.fullmatch(path.name)}
    for name in there:
        if name not in state.checkpoints or state.checkpoints[name][0] != index.checkpoints.get(name):
            shutil.rmtree(folder / name)
    checkpoints = {}
    for name, data in index.checkpoints.items():
        if (folder / name).exists():
            checkpoints[name] = state.checkpoints[name]
            continue
        contents = read_contents(objects, data)
        _show(folder / name, contents.files)
        checkpoints[name] = data, contents.chunk
    for name, tag in index.files.items():
        if state.files.get(name) != tag or not (folder / name).exists():
            with contextlib.suppress(MissingObjectError):
                _replace(folder / name, objects.read(name)[0])
    if index.latest is not None:
        _replace(folder / LATEST, f"{index.latest}\n".encode())
    else:
        (folder / LATEST).unlink(missing_ok=True)
    if index.folder and not (folder / ".lock").exists():
        (folder / ".lock").write_text(f"\nfolder {index.folder}\n")
    _State(index.folder, checkpoints, dict(index.files)).write(folder)


def _show(place: Path, files: dict[str, int]) -> None:
    """Make a folder of files that are still to be fetched."""
    aside = place.with_name(f".mirror.{place.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for name, size in files.items():
        descriptor = os.open(aside / Path(name).name, os.O_WRONLY | os.O_CREAT, _UNFETCHED)
        os.ftruncate(descriptor, size)
        os.close(descriptor)
    os.rename(aside, place)


def _replace(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".mirror.{path.name}")
    aside.write_bytes(content)
    os.replace(aside, path)


def fetch(path: Path) -> None:
    """Fetch a file of a checkpoint, unless this host has it; does nothing if there is no such file.

    Raises:
        DamagedCheckpointError: an object is missing.
        CheckpointError: the store does not answer, or the disk is full.
    """
    if path.name == "manifest.json" or not path.parent.exists():  # what one opens first
        refresh(path.parent.parent)
    try:
        while not _is_fetched(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                try_lock(descriptor, wait=True)
                if os.path.samestat(os.fstat(descriptor), os.lstat(path)) and not _is_fetched(path):
                    with reading():
                        _fill(path, descriptor)
            finally:
                os.close(descriptor)
        os.utime(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"`{path}` must be fetched, but cannot be: {error.strerror}") from error


def _is_fetched(path: Path) -> bool:
    return stat.S_IMODE(os.lstat(path).st_mode) != _UNFETCHED


def _fill(path: Path, descriptor: int) -> None:
    """Write a file's content into it, then let it be read."""
    run, size = path.parent.parent, os.fstat(descriptor).st_size
    data, chunk = _State.read(run).checkpoints.get(path.parent.name, ("", 0))
    objects, whole, step = open_objects(run), size < chunk, min(_PIECE, chunk)
    if not chunk:
        raise FileNotFoundError
    _make_room(size)

    def get(start: int) -> None:
        count, key = min(step, size - start), f"{data}/{path.name}"
        first, key = (start, key) if whole else (start % chunk, piece_name(key, start // chunk))
        (piece,) = objects.ranges(key, [first], [first + count])
        os.pwrite(descriptor, piece, start)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(get, range(0, size, step)))
    os.fsync(descriptor)
    os.fchmod(descriptor, _FETCHED)


def _make_room(size: int) -> None:
    """Let go of fetched files, those first that were used longest ago, until half of the room is free."""
    root = mirror_root()
    kept = [(p.stat().st_mtime, p) for p in root.rglob("iter_*/*") if p.is_file() and _is_fetched(p)]
    free, total = shutil.disk_usage(root).free, sum(p.stat().st_size for _, p in kept)
    for _, path in sorted(kept):
        if total + size <= (free + total) // 2:
            return
        total, free = total - path.stat().st_size, free + path.stat().st_size
        _show_again(path)


def _show_again(path: Path) -> None:
    """Put a file that is still to be fetched in the place of a fetched one."""
    aside = path.parent.parent / f".mirror.{path.parent.name}.{path.name}"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _UNFETCHED)
    os.ftruncate(descriptor, path.stat().st_size)
    os.close(descriptor)
    os.replace(aside, path)
