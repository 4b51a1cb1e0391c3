"""Disks that count, stop, fail, or forget at a power cut what was not synced."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megazero.checkpoint.disk import Disk, File


class Stopped(BaseException):
    """Stands for a kill: no code under test may catch it."""


@dataclass(frozen=True)
class Change:
    """One change of the file system that is about to happen.

    `name` is the method's, of `Disk` or `File`; `data` are the bytes of a write, `target` the new name of a rename.
    """

    name: str
    path: Path
    data: memoryview | None = None
    target: Path | None = None


@dataclass(frozen=True)
class Verdict:
    """That a change does not happen, or only the first `written` bytes of it; `end` raises or kills."""

    end: Callable[[], None]
    written: int = 0


Fault = Callable[[Change], Verdict | None]
"""Looks at each change before it happens and may end it."""


class FaultyDisk(Disk):
    """A real disk with a fault and, if wanted, a model of what a power cut would leave of it.

    Nothing is really synced, which would take most of the time: what outlives the process is enough.

    Args:
        fault: asked before each change.
        medium: told of each change that happened.
    """

    def __init__(self, fault: Fault | None = None, medium: Medium | None = None):
        self.fault = fault or (lambda change: None)
        self.medium = medium

    def make_folder(self, path: Path) -> None:
        self.pass_on(Change("make_folder", path), lambda _: Disk.make_folder(self, path))

    def create(self, path: Path) -> File:
        return self.pass_on(Change("create", path), lambda _: _FaultyFile(self, path))

    def rename(self, old: Path, new: Path) -> None:
        self.pass_on(Change("rename", old, target=new), lambda _: Disk.rename(self, old, new))

    def sync_folder(self, path: Path) -> None:
        self.pass_on(Change("sync_folder", path), lambda _: None)

    def remove_file(self, path: Path) -> None:
        self.pass_on(Change("remove_file", path), lambda _: Disk.remove_file(self, path))

    def remove_folder(self, path: Path) -> None:
        self.pass_on(Change("remove_folder", path), lambda _: Disk.remove_folder(self, path))

    def pass_on(self, change: Change, do: Callable[[memoryview | None], object]):
        """Do a change, as far as the fault lets it happen."""
        verdict = self.fault(change)
        if verdict is None:
            return self._do(change, do)
        if verdict.written:
            self._do(Change(change.name, change.path, change.data[: verdict.written]), do)
        verdict.end()
        raise AssertionError("a verdict ends what it judges")

    def _do(self, change: Change, do: Callable[[memoryview | None], object]):
        if self.medium is None:
            return do(change.data)
        with self.medium.lock:
            result = do(change.data)
            self.medium.note(change)
        return result


class _FaultyFile:
    def __init__(self, disk: FaultyDisk, path: Path):
        self._disk, self._path, self._file = disk, path, Disk.create(disk, path)

    def write(self, data: bytes | memoryview) -> None:
        self._disk.pass_on(Change("write", self._path, memoryview(data)), self._file.write)

    def sync(self) -> None:
        self._disk.pass_on(Change("sync", self._path), lambda _: None)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _FaultyFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# Faults.


def stop() -> None:
    """The end of a verdict, within the process."""
    raise Stopped


def kill() -> None:
    """The end of a verdict, for a process of its own."""
    os.kill(os.getpid(), signal.SIGKILL)


class Counter:
    """Lets all happen and remembers it."""

    def __init__(self) -> None:
        self.log: list[Change] = []

    def __call__(self, change: Change) -> None:
        self.log.append(change)


class StopAt:
    """Ends the change of this number (from 0), after half of its bytes if it is a write and `half` is set.

    All later changes end too, also those of other disks with this fault: who is dead changes nothing.
    """

    def __init__(self, number: int, half: bool = False, end: Callable[[], None] = stop):
        self.number, self.half, self.end = number, half, end
        self.count, self.stopped = 0, False
        self._lock = threading.Lock()

    def __call__(self, change: Change) -> Verdict | None:
        with self._lock:
            count, self.count = self.count, self.count + 1
            if self.stopped or count < self.number:
                return Verdict(stop) if self.stopped else None
            self.stopped = True
            return Verdict(self.end, len(change.data) // 2 if self.half and change.name == "write" else 0)


@dataclass
class Refuse:
    """Refuses changes with an error of the system, while `on`, those for which `when` holds."""

    number: int
    when: Callable[[Change], bool] = lambda change: True
    on: bool = True

    def __call__(self, change: Change) -> Verdict | None:
        return self._refusal(change) if self.on and self.when(change) else None

    def _refusal(self, change: Change, written: int = 0) -> Verdict:
        def end() -> None:
            raise OSError(self.number, os.strerror(self.number), str(change.path))

        return Verdict(end, written)


@dataclass
class Full(Refuse):
    """A disk with so many bytes of `room`: the write that does not fit is cut, as POSIX has it, then refused."""

    room: int = 0

    def __call__(self, change: Change) -> Verdict | None:
        if not self.on or change.name != "write":
            return None
        written = min(self.room, len(change.data))
        self.room -= written
        return None if written == len(change.data) else self._refusal(change, written)


# What a power cut leaves.


@dataclass(eq=False)
class _File:
    content: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class _Folder:
    """`states[-1]` is what it shows, `states[0]` what is on the medium for certain; any of them may be found."""

    states: list[dict[str, _File | _Folder]] = field(default_factory=lambda: [{}])

    def change(self, **entries: _File | _Folder | None) -> None:
        after = {**self.states[-1], **entries}
        self.states.append({name: node for name, node in after.items() if node is not None})


Tree = Mapping[str, object]
"""Name -> bytes of a file, or the tree of a folder."""


class Medium:
    """A model of the file system below `root` that knows what has been synced.

    The worst that POSIX allows, but for the order within a folder: a file's bytes since its last sync are there or
    not; of each folder any state since its last sync is found, whatever is found of other folders.
    """

    def __init__(self, root: Path):
        self.root = root
        self.lock = threading.Lock()
        self._top = _load(root)

    def note(self, change: Change) -> None:
        """A change has happened."""
        folder, name = self._at(change.path.parent), change.path.name
        match change.name:
            case "make_folder":
                folder.change(**{name: _Folder()})
            case "create":
                folder.change(**{name: _File()})
            case "write":
                folder.states[-1][name].content += bytes(change.data)
            case "sync":
                file = folder.states[-1][name]
                file.synced = file.content
            case "rename":
                assert change.target.parent == change.path.parent, "what moves between folders is not modelled"
                folder.change(**{name: None, change.target.name: folder.states[-1][name]})
            case "sync_folder":
                synced = self._at(change.path)
                del synced.states[:-1]
            case "remove_file" | "remove_folder":
                folder.change(**{name: None})
            case other:
                raise AssertionError(other)

    def found_after_cut(self) -> Iterator[Tree]:
        """What may be there when the power is back, each once."""
        seen = []
        folders = [f for f in _folders(self._top) if len(f.states) > 1]
        # Of all but the folder of the run, the two ends are enough: what counts is whether they are complete.
        ranges = [range(len(f.states)) if self._is_run(f) else (0, len(f.states) - 1) for f in folders]
        for choice in itertools.product(*ranges):
            for synced_only in (True, False):
                chosen = dict(zip(map(id, folders), choice, strict=True))
                tree = _tree(self._top, chosen, synced_only)
                if tree not in seen:
                    seen.append(tree)
                    yield tree

    def _is_run(self, folder: _Folder) -> bool:
        return any(folder in state.values() for state in self._top.states)

    def _at(self, path: Path) -> _Folder:
        if not path.is_relative_to(self.root):  # above the model
            return _Folder()
        found = self._top
        for name in path.relative_to(self.root).parts:
            found = found.states[-1][name]
        return found


def _load(path: Path) -> _Folder:
    folder = _Folder()
    for each in path.iterdir():
        content = b"" if each.is_dir() else each.read_bytes()
        folder.states[0][each.name] = _load(each) if each.is_dir() else _File(content, content)
    return folder


def _folders(folder: _Folder) -> list[_Folder]:
    """It and all that any of its states holds, each once."""
    found = {id(folder): folder}
    for state in folder.states:
        for node in state.values():
            if isinstance(node, _Folder):
                found |= {id(each): each for each in _folders(node)}
    return list(found.values())


def _tree(folder: _Folder, chosen: Mapping[int, int], synced_only: bool) -> Tree:
    state = folder.states[chosen.get(id(folder), -1)]
    return {
        name: _tree(node, chosen, synced_only)
        if isinstance(node, _Folder)
        else (node.synced if synced_only else node.content)
        for name, node in state.items()
    }


def put(tree: Tree, path: Path) -> None:
    """Write a tree into a new folder."""
    path.mkdir()
    for name, node in tree.items():
        if isinstance(node, bytes):
            (path / name).write_bytes(node)
        else:
            put(node, path / name)
