"""`RemoteDisk`: the changes of a run's folder, made on object storage.

Files go there while they are written, below a name that is the save's own. A checkpoint becomes visible, or
stops to be, by one conditional write of the run's index; only then are older objects deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from megazero.checkpoint.disk import Disk, File
from megazero.checkpoint.remote.index import INDEX, LATEST, RunIndex, piece_name, read_index, write_contents
from megazero.checkpoint.remote.mirror import (
    VISIBLE,
    in_mirror,
    locked,
    materialize,
    open_objects,
    reading,
    refresh,
)
from megazero.errors import CheckpointError, LostFolderError, StorageError
from megazero.file_lock import this_process
from megazero.storage.objects import LostRaceError, MissingObjectError, Objects

CHUNK = 32 << 20
"""Bytes of an object; a larger file is several."""
_UPLOADS = 4
_HIDDEN = re.compile(r"\.(iter_[0-9]{7,18})\.(partial|replaced|removed)")
_OURS = re.compile(r"(iter_[0-9]{7,18}\.[0-9a-f]{16})/.*|\.probe\.[0-9a-f]{16}")
_TRIES = 5


class RemoteFile(File):
    """A new file on object storage, sent in chunks while later bytes are written."""

    def __init__(self, objects: Objects, name: str):
        self._objects, self._name = objects, name
        self._buffer = bytearray()
        self._number = 0
        self._pool: ThreadPoolExecutor | None = None
        self._puts: deque[Future[str]] = deque()

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`, a view of bytes."""
        data = memoryview(data)
        while data:
            count = CHUNK - len(self._buffer)
            self._buffer += data[:count]
            data = data[count:]
            if len(self._buffer) == CHUNK:
                self._send()

    def sync(self) -> None:
        """Return when everything written is in the store."""
        if self._number and self._buffer:
            self._send()
        with _as_of_a_disk():
            while self._puts:
                self._puts.popleft().result()
            if not self._number:
                self._objects.create(self._name, bytes(self._buffer))

    def close(self) -> None:
        """Let go of the file; what was not synced may not arrive. A second call does nothing."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _send(self) -> None:
        self._pool = self._pool or ThreadPoolExecutor(_UPLOADS, "upload")
        with _as_of_a_disk():
            while len(self._puts) >= _UPLOADS:
                self._puts.popleft().result()
        name, self._number = piece_name(self._name, self._number), self._number + 1
        self._puts.append(self._pool.submit(self._objects.create, name, bytes(self._buffer)))
        self._buffer.clear()


class RemoteDisk(Disk):
    """The changes of a run's folder at a URL, given the folder of its mirror.

    Raises:
        OSError: in all methods: the store does not answer, or refuses.
        LostFolderError: in all that change what is visible: another job has taken the folder.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._token = ""
        self._places: dict[str, str] = {}  # name of a hidden folder -> that below which its objects are
        self._doubtful: set[str] = set()  # hidden folders of which the index may have become visible or not
        self._put: dict[str, tuple[int, int]] = {}  # the run's other files, as they were put last
        self._lock = threading.Lock()
        self._index = RunIndex()
        with reading():
            self._objects = open_objects(folder)

    def make_parents(self, path: Path) -> None:
        """Make the mirror, as it is to be before the folder is locked."""
        refresh(path)

    def claim(self, identity: str) -> str:
        """Take the folder for this job, from whoever had it, and clear what jobs have left that were killed.

        Raises CheckpointError if the store ignores conditions, or other jobs begin at the same moment.
        """
        self._token = secrets.token_hex(16)
        with reading(), locked(self._folder):
            self._check_store()
            index, holder = RunIndex(), this_process()

            def own(before: RunIndex | None) -> RunIndex:
                nonlocal index
                index = before or RunIndex()
                return replace(index, owner=self._token, holder=holder, folder=index.folder or identity)

            self._index = _replace_index(self._objects, own)
            if index.owner and index.holder.partition(" on ")[2] != holder.partition(" on ")[2]:
                warnings.warn(
                    f"{self._objects.url} was last written by {index.holder}, which has not let go: if "
                    "that job still runs, it saves nothing more",
                    stacklevel=2,
                )
            for path in self._folder.iterdir():
                if _HIDDEN.fullmatch(path.name):
                    shutil.rmtree(path)
            materialize(self._folder, self._objects, self._index)
            visible = set(self._index.checkpoints.values())
            ours = [(item.name, m) for item in self._objects.names() if (m := _OURS.fullmatch(item.name))]
            self._objects.delete([name for name, match in ours if match[1] not in visible])
            if self._index.latest is not None:
                self._say_latest(f"{self._index.latest}\n")
        return self._index.folder

    def release(self) -> None:
        """Put the run's files, and let go of the folder; a failure is printed."""
        try:
            self._change(lambda index: replace(index, owner="", holder="", files=self._put_files(index)))
        except LostFolderError:
            pass
        except OSError as error:
            print(f"warning: the run's files are not all at {self._objects.url}: {error}", file=sys.stderr)

    def begin(self, folder: Path, save: str) -> None:
        """Note the random name of the save that a hidden folder is of."""
        match = _HIDDEN.fullmatch(folder.name)
        assert match is not None, "a save is written into a hidden folder"
        self._places[folder.name] = f"{match[1]}.{save}"

    def make_folder(self, path: Path) -> None:
        """Begin a save, if the folder is still this job's; the store has no folders."""
        with self._lock, _as_of_a_disk():
            self._owned(read_index(self._objects)[0])
        path.mkdir(parents=True)
        self.begin(path, secrets.token_hex(8))

    def create(self, path: Path) -> File:
        """Make a file of a save."""
        return RemoteFile(self._objects, f"{self._places[path.parent.name]}/{path.name}")

    def rename(self, old: Path, new: Path) -> None:
        """Make a checkpoint visible, or hide one; see `folder.publish` and `folder.remove_checkpoint`."""
        hidden = _HIDDEN.fullmatch(new.name)
        if hidden is not None:
            self._places[new.name] = self._index.checkpoints.get(old.name, f"{old.name}.gone")
        if hidden is not None and hidden[2] == "removed":
            self._change(lambda index: replace(index, checkpoints=_without(index.checkpoints, old.name)))
            new.mkdir()
        elif old.name.endswith(".partial"):
            self._commit(old, new)
        else:
            os.rename(old, new)

    def write_text(self, path: Path, text: str) -> None:
        """Say which checkpoint is the newest to other programs too; the index has it already."""
        assert path.name == LATEST, "nothing else is written so"
        with self._lock, _as_of_a_disk():
            self._say_latest(text)

    def sync_folder(self, path: Path) -> None:
        """Do nothing: what the store has taken lasts."""

    def remove(self, path: Path) -> None:
        """Remove a hidden folder, and its objects."""
        data = self._places.get(path.name)
        if path.name in self._doubtful:
            self._change(lambda index: index)  # after it no earlier write of the index can succeed any more
            self._doubtful.remove(path.name)
            data = None if data in self._index.checkpoints.values() else data
        if data is not None:
            with _as_of_a_disk():
                self._objects.delete([item.name for item in self._objects.names(data)])
        shutil.rmtree(path)

    def _commit(self, partial: Path, final: Path) -> None:
        data = self._places[partial.name]
        self._doubtful.add(partial.name)
        with _as_of_a_disk():
            write_contents(self._objects, data, CHUNK)
        iteration = int(final.name.removeprefix("iter_"))

        def add(index: RunIndex) -> RunIndex:
            checkpoints = {**index.checkpoints, final.name: data}
            return replace(index, latest=iteration, checkpoints=checkpoints, files=self._put_files(index))

        self._change(add)
        self._doubtful.remove(partial.name)
        shutil.rmtree(partial, ignore_errors=True)

    def _change(self, change: Callable[[RunIndex], RunIndex]) -> None:
        """Change the index, if the folder is this job's; then let the mirror show it."""
        with self._lock, _as_of_a_disk(), locked(self._folder):
            self._index = _replace_index(self._objects, lambda index: change(self._owned(index)))
            with contextlib.suppress(StorageError, OSError):  # what is visible has changed
                materialize(self._folder, self._objects, self._index)

    def _say_latest(self, text: str) -> None:
        """Replace the file that names the newest checkpoint, unless another job has meanwhile."""
        try:
            tag = self._objects.tag(LATEST)
        except MissingObjectError:
            tag = ""
        self._owned(read_index(self._objects)[0])
        try:
            _put_if(self._objects, LATEST, text.encode(), tag)
        except LostRaceError:
            self._owned(read_index(self._objects)[0])
            raise

    def _owned(self, index: RunIndex | None) -> RunIndex:
        """The index as it is. Raises LostFolderError if it has another job's name."""
        if index is None or index.owner != self._token:
            holder = "nobody" if index is None else index.holder or "another run"
            raise LostFolderError(
                f"`{self._objects.url}` must be written by one job at a time, but was taken over while this "
                f"job ran, and now belongs to {holder}; this job writes nothing more there: begin it again "
                "with another folder to save to"
            )
        return index

    def _put_files(self, index: RunIndex) -> dict[str, str]:
        """Put what else lies in the run's folder and has changed; returns all such files with their tags."""
        tags = dict(index.files)
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder)
            own = any(part == LATEST or part[0] == "." or VISIBLE.fullmatch(part) for part in name.parts)
            if own or not path.is_file():
                continue
            status = path.stat()
            if self._put.get(str(name)) != (status.st_size, status.st_mtime_ns):
                tags[str(name)] = self._objects.put(str(name), path.read_bytes())
                self._put[str(name)] = status.st_size, status.st_mtime_ns
        return tags

    def _check_store(self) -> None:
        """Raise unless the store refuses a write whose condition does not hold."""
        name = f".probe.{secrets.token_hex(8)}"
        self._objects.create(name, b"1")
        try:
            for tag in ("", '"00000000000000000000000000000000"'):
                with contextlib.suppress(LostRaceError):
                    _put_if(self._objects, name, b"2", tag)
                    raise CheckpointError(
                        f"`{self._objects.url}` must be in a store that obeys conditions of writes, but this "
                        "one ignores If-None-Match or If-Match, so two jobs could mix their checkpoints; "
                        "save to another store"
                    )
        finally:
            self._objects.delete([name])


def disk_for(folder: Path) -> Disk:
    """The disk for changes in a run's folder: object storage, if that is a mirror."""
    return RemoteDisk(folder) if in_mirror(folder) else Disk()


def put_file(path: Path) -> None:
    """Put a file that a command wrote into a run's folder, if that is a mirror, and note it in the index."""
    if not in_mirror(path):
        return
    with reading():
        objects = open_objects(path.parent)
        tag = objects.put(path.name, path.read_bytes())
        if read_index(objects)[1]:  # else nothing was ever saved there, or it is a plain copy

            def note(index: RunIndex | None) -> RunIndex:
                index = index or RunIndex()
                return replace(index, files={**index.files, path.name: tag})

            _replace_index(objects, note)


def _replace_index(objects: Objects, change: Callable[[RunIndex | None], RunIndex]) -> RunIndex:
    """Replace a run's index by what `change` makes of it; returns the new one."""
    for _ in range(_TRIES):
        before, tag = read_index(objects)
        after = change(before)
        after = replace(after, changes=after.changes + 1)
        with contextlib.suppress(LostRaceError):
            _put_if(objects, INDEX, after.dump(), tag)
            return after
    raise StorageError(
        f"`{objects.url / INDEX}` must be replaced by one job at a time, but several do so; end the others."
    )


def _put_if(objects: Objects, name: str, content: bytes, tag: str) -> str:
    """Replace the object that has this tag; without one there must be none. Returns the new tag."""
    return objects.swap(name, content, tag) if tag else objects.create(name, content)


def _without(places: Mapping[str, str], name: str) -> dict[str, str]:
    return {other: data for other, data in places.items() if other != name}


@contextlib.contextmanager
def _as_of_a_disk() -> Iterator[None]:
    """Raise errors of the store as those of a disk."""
    try:
        yield
    except StorageError as error:
        raise OSError(str(error)) from None
