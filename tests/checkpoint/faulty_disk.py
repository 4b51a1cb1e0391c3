"""Disks that count their changes, stop before any of them, or refuse one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megazero.checkpoint.disk import Disk, File
from tests.checkpoint.power_cut import Change, Medium


class Stopped(BaseException):
    """Simulates a kill: a BaseException that no code under test catches."""


@dataclass(frozen=True)
class Verdict:
    """The end of a change: its first `written` bytes are written, then `end` raises or kills."""

    end: Callable[[], None]
    written: int = 0


Fault = Callable[[Change], Verdict | None]
"""Looks at each change before it happens and may end it."""


class FaultyDisk(Disk):
    """A real disk with a fault and, optionally, a model of what a power cut would leave.

    Nothing is synced, which would take most of the time: data need to outlive the process only.

    Args:
        fault: called before each change.
        medium: notes each change after it has happened.
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
        """Make a change, unless the fault ends it."""
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
    """Raise `Stopped`."""
    raise Stopped


def kill() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


class Counter:
    """A fault that lets all changes happen and logs them."""

    def __init__(self) -> None:
        self.log: list[Change] = []

    def __call__(self, change: Change) -> None:
        self.log.append(change)


class StopAt:
    """Ends change `number` (from 0); with `half`, a write ends after half of its bytes.

    All later changes end too, also those of other disks with this fault, as after a kill. `stopped_at` is the
    name of the change, or empty if there were fewer.
    """

    def __init__(self, number: int, half: bool = False, end: Callable[[], None] = stop):
        self.number, self.half, self.end = number, half, end
        self.count, self.stopped_at = 0, ""
        self._lock = threading.Lock()

    @property
    def stopped(self) -> bool:
        """Whether the change was reached."""
        return bool(self.stopped_at)

    def __call__(self, change: Change) -> Verdict | None:
        with self._lock:
            count, self.count = self.count, self.count + 1
            if self.stopped or count < self.number:
                return Verdict(stop) if self.stopped else None
            self.stopped_at = change.name
            return Verdict(self.end, len(change.data) // 2 if self.half and change.name == "write" else 0)


@dataclass
class Refuse:
    """While `on`, refuses the changes for which `when` is true with the system error `number`."""

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
    """A disk with `room` bytes left; a write that does not fit is cut, as in POSIX, and refused."""

    room: int = 0

    def __call__(self, change: Change) -> Verdict | None:
        if not (self.on and self.when(change) and change.name == "write"):
            return None
        written = min(self.room, len(change.data))
        self.room -= written
        return None if written == len(change.data) else self._refusal(change, written)
