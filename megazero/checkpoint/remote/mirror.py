"""The local mirror of a run's folder at a URL, in this host's cache.

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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megazero.checkpoint.remote.index import (
    LATEST,
    RunIndex,
    piece_name,
    read_contents,
    read_index,
    sizes_of_pieces,
)
from megazero.checkpoint.remote.patient import PatientObjects
from megazero.errors import CheckpointError, DamagedCheckpointError, StorageError
from megazero.storage.cached import alone
from megazero.storage.objects import MissingObjectError, Objects
from megazero.storage.urls import Url, is_url

VISIBLE = re.compile("iter_[0-9]{7,18}")
_STATE, _LOCK = ".mirror.json", ".mirror.lock"
_FETCHED, _UNFETCHED = stat.S_IRUSR | stat.S_IWUSR, stat.S_IWUSR  # modes: nobody may read what is not there
_PIECE, _THREADS = 32 << 20, 4


def local_path(given: str | Path) -> Path:
    """A path as it is; for a URL the folder of its mirror, by the URL alone. StorageError if it is none."""
    if not is_url(given):
        return Path(given)
    url = Url.parse(str(given))
    return _root() / url.scheme / url.bucket / url.key


def local_folder(given: str | Path) -> Path:
    """As `local_path`; a mirror then shows all visible checkpoints. Raises CheckpointError, see `refresh`."""
    path = local_path(given)
    if in_mirror(path):
        refresh(path.parent if VISIBLE.fullmatch(path.name) else path)
    return path


def local_file(path: Path) -> Path:
    """A file of a checkpoint; if it lies in a mirror, it is fetched unless this host has it.

    Raises:
        DamagedCheckpointError: an object is missing.
        CheckpointError: the store does not answer, or the disk is full.
    """
    if not in_mirror(path):
        return path
    if path.name == "manifest.json" or not path.parent.exists():  # what one opens first
        refresh(path.parent.parent)
    try:
        if not _is_fetched(path):
            with alone(path):
                if not _is_fetched(path):  # another rank may have been faster
                    _fetch(path)
        os.utime(path)
    except FileNotFoundError:  # as whoever opens it will say
        return path
    except OSError as error:
        raise CheckpointError(f"`{path}` must be fetched, but cannot be: {error.strerror}") from error
    return path


def in_mirror(path: str | Path) -> bool:
    """Whether a path is a mirror, or below one."""
    return str(path).startswith(f"{_root()}{os.sep}")


def stored_sizes(folder: Path) -> dict[str, int] | None:
    """The bytes that the store has now of each file of a checkpoint, by a listing; None for a local one."""
    if not in_mirror(folder):
        return None
    data = _State.read(folder.parent).checkpoints[folder.name][0]
    with reading():
        pieces = sizes_of_pieces(open_objects(folder.parent), data)
    return {name: sum(sizes.values()) for name, sizes in pieces.items()}


def open_objects(folder: Path) -> Objects:
    """The objects that a folder in a mirror shows."""
    scheme, bucket, *key = folder.relative_to(_root()).parts
    return PatientObjects(Url(scheme, bucket, "/".join(key)))


def refresh(folder: Path) -> None:
    """Bring the mirror of a run's folder up to date. Raises CheckpointError if its URL cannot be read."""
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
    """Hold the lock on a mirror, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / _LOCK):
        yield


@dataclass
class _State:
    """The identity of a mirror's folder, its checkpoints with their places, its files with their tags."""

    folder: str
    checkpoints: dict[str, tuple[str, int]]
    files: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> _State:
        try:
            return cls(**json.loads((folder / _STATE).read_text()))
        except (OSError, ValueError, TypeError):
            return cls("", {}, {})


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
    for path in [path for path in folder.iterdir() if VISIBLE.fullmatch(path.name)]:
        if state.checkpoints.get(path.name, ("", 0))[0] != index.checkpoints.get(path.name):
            shutil.rmtree(path)
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
    shown = {"folder": index.folder, "checkpoints": checkpoints, "files": dict(index.files)}
    _replace(folder / _STATE, json.dumps(shown).encode())


def _show(place: Path, files: Mapping[str, int]) -> None:
    """Make a folder of files that are still to be fetched."""
    aside = place.with_name(f".mirror.{place.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for name, size in files.items():
        _show_file(aside / Path(name).name, size)
    os.rename(aside, place)


def _show_file(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _UNFETCHED)
    os.ftruncate(descriptor, size)
    os.close(descriptor)


def _replace(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".mirror.{path.name}")
    aside.write_bytes(content)
    os.replace(aside, path)


def _is_fetched(path: Path) -> bool:
    return stat.S_IMODE(os.lstat(path).st_mode) != _UNFETCHED


def _fetch(path: Path) -> None:
    """Write a file's content into it, then let it be read."""
    run, size = path.parent.parent, path.stat().st_size
    data, chunk = _State.read(run).checkpoints.get(path.parent.name, ("", 0))
    if not chunk:
        raise FileNotFoundError
    _make_room(size)
    with reading(), open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "wb") as file:
        objects, whole, step = open_objects(run), size < chunk, min(_PIECE, chunk)

        def get(start: int) -> None:
            count, key = min(step, size - start), f"{data}/{path.name}"
            first, key = (start, key) if whole else (start % chunk, piece_name(key, start // chunk))
            (piece,) = objects.ranges(key, [first], [first + count])
            os.pwrite(file.fileno(), piece, start)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(get, range(0, size, step)))
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), _FETCHED)


def _make_room(size: int) -> None:
    """Let go of fetched files, those first that were used longest ago, until half of the room is free."""
    files = [path for path in _root().rglob("iter_*/*") if path.is_file() and _is_fetched(path)]
    kept = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in files)
    free, total = shutil.disk_usage(_root()).free, sum(count for _, count, _ in kept)
    for _, count, path in kept:
        if total + size <= (free + total) // 2:
            return
        total, free = total - count, free + count
        aside = path.parent.parent / f".mirror.{path.parent.name}.{path.name}"
        _show_file(aside, count)
        os.replace(aside, path)


def _root() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "megazero" / "mirror"
