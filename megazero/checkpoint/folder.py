"""The folder of a run: its checkpoints, which of them is the newest, who may write, and what is kept.

A checkpoint is written in a hidden folder and becomes visible by one rename; then
``latest_checkpointed_iteration.txt`` names it, as in Megatron. What is removed is hidden by one rename first.
So at any moment what is visible is whole, and what a killed run leaves behind is hidden, to be cleared by the
next.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megazero.checkpoint.disk import Disk
from megazero.errors import CheckpointError, DamagedCheckpointError

LATEST = "latest_checkpointed_iteration.txt"
LOCK = ".lock"
_VISIBLE = re.compile(r"iter_(\d{7,})")
_LEFTOVER = re.compile(
    r"\.iter_(\d{7,})\.(partial|replaced|removed)|" + re.escape(f".{LATEST}.") + "[0-9a-f]{16}"
)


def iteration_folder(directory: str | Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` lies."""
    return Path(directory) / f"iter_{iteration:07d}"


def hidden_folder(directory: str | Path, iteration: int, state: str) -> Path:
    """Where it lies while it is `partial`, `replaced` or `removed`."""
    return Path(directory) / f".iter_{iteration:07d}.{state}"


def saved_iterations(directory: str | Path) -> list[int]:
    """Iterations of the visible checkpoints, ascending."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (_VISIBLE.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def latest_iteration(directory: str | Path) -> int | None:
    """What ``latest_checkpointed_iteration.txt`` names, or None where there is no such file.

    Raises:
        DamagedCheckpointError: it does not hold a number.
        CheckpointError: it holds `release`, as Megatron's do for converted weights.
    """
    path = Path(directory) / LATEST
    try:
        text = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedCheckpointError(f"`{path}` cannot be read: {error}") from error
    if text == "release":
        raise CheckpointError(
            f"`{path}` must hold an iteration number, but holds 'release', which Megatron writes; "
            f"bring it over with `megazero checkpoint import-megatron`"
        )
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise DamagedCheckpointError(
            f"`{path}` must hold an iteration number, but holds {text[:40]!r}; mend or delete it"
        )
    return int(text)


@dataclass(frozen=True)
class Candidates:
    """Checkpoints to try, the best first.

    Attributes:
        folders: the one that the run's file names, then the others, newest first.
        remarks: what was odd about the file.
    """

    folders: tuple[Path, ...]
    remarks: tuple[str, ...] = ()


def candidates(directory: str | Path, iteration: int | None = None) -> Candidates:
    """What may be loaded from a run's folder: any, or that of one iteration alone.

    Raises:
        CheckpointError: the folder is Megatron's, or has no such iteration.
    """
    directory = Path(directory)
    if iteration is not None:
        if iteration not in saved_iterations(directory):
            raise CheckpointError(
                f"`ckpt_step` must be an iteration that {directory} holds "
                f"({', '.join(map(str, saved_iterations(directory))) or 'none'}), but is {iteration}"
            )
        return Candidates((iteration_folder(directory, iteration),))
    remarks = []
    try:
        named = latest_iteration(directory)
    except DamagedCheckpointError as error:
        named = None
        remarks.append(str(error))
    saved = saved_iterations(directory)
    order = sorted(saved, reverse=True)
    if named is not None:
        if named not in saved:
            remarks.append(
                f"`{directory / LATEST}` names {iteration_folder(directory, named)}, which is missing"
            )
        elif named != order[0]:
            remarks.append(f"`{directory / LATEST}` names iteration {named}, although {order[0]} is there")
        order = [named] * (named in saved) + [each for each in order if each != named]
    return Candidates(tuple(iteration_folder(directory, each) for each in order), tuple(remarks))


class WriterLock:
    """The right to write into a folder, which one job at a time has; the system takes it back when it ends.

    Raises:
        CheckpointError: another job has it.
    """

    def __init__(self, directory: Path):
        path = directory / LOCK
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 200, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise CheckpointError(
                f"`{directory}` must be written by one job at a time, but {holder or 'another job'} does; "
                f"end that job or save elsewhere"
            ) from None
        except OSError:
            os.close(self._file)
            raise
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Let others write."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass(frozen=True)
class Leftover:
    """What a killed run left, or what a running one is at.

    Attributes:
        path: hidden.
        restored: the checkpoint that it becomes again, where what was to replace it did not come; None for what
            is only to be removed.
    """

    path: Path
    restored: Path | None = None


def leftovers(directory: str | Path) -> list[Leftover]:
    """What `recover` would clear, by name."""
    directory = Path(directory)
    found = []
    for name in sorted(os.listdir(directory)):
        match = _LEFTOVER.fullmatch(name)
        if match is None:
            continue
        restored = None
        if match[2] == "replaced" and not iteration_folder(directory, int(match[1])).exists():
            restored = iteration_folder(directory, int(match[1]))
        found.append(Leftover(directory / name, restored))
    return found


def recover(disk: Disk, directory: Path) -> None:
    """Clear what a killed run left: its lock's holder calls this before it writes."""
    for each in leftovers(directory):
        if each.restored is not None:
            disk.rename(each.path, each.restored)
        else:
            disk.remove(each.path)


def publish(disk: Disk, directory: Path, iteration: int) -> Path:
    """Make a partial checkpoint, complete and synced, the visible newest one."""
    final = iteration_folder(directory, iteration)
    replaced = hidden_folder(directory, iteration, "replaced")
    if final.exists():
        if replaced.exists():
            disk.remove(replaced)
        disk.rename(final, replaced)
    try:
        disk.rename(hidden_folder(directory, iteration, "partial"), final)
    except OSError:
        if replaced.exists():
            disk.rename(replaced, final)
        raise
    disk.sync_folder(directory)
    disk.write_text(directory / LATEST, f"{iteration}\n")
    if replaced.exists():
        disk.remove(replaced)
    return final


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the newest, and ...

    Attributes:
        last: so many of the newest; None keeps all.
        every: those whose iteration this divides; None spares none.
    """

    last: int | None = None
    every: int | None = None

    def superseded(self, iterations: list[int], latest: int | None) -> Iterator[int]:
        """Those that may go, oldest first. `latest`, which a resume would take, always stays."""
        if self.last is None:
            return
        for iteration in sorted(iterations)[: -max(1, self.last)]:
            if iteration != latest and not (self.every and iteration % self.every == 0):
                yield iteration


def prune(
    disk: Disk, directory: Path, retention: Retention, on_removed: Callable[[Path], None] = lambda path: None
) -> None:
    """Remove the checkpoints that are not kept."""
    latest = latest_iteration(directory)
    for iteration in list(retention.superseded(saved_iterations(directory), latest)):
        remove_checkpoint(disk, directory, iteration)
        on_removed(iteration_folder(directory, iteration))


def remove_checkpoint(disk: Disk, directory: Path, iteration: int) -> None:
    """Remove a visible checkpoint; it is invisible before the first of its files goes."""
    hidden = hidden_folder(directory, iteration, "removed")
    disk.rename(iteration_folder(directory, iteration), hidden)
    disk.remove(hidden)
