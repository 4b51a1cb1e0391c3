"""`megazero checkpoint prune`: remove old checkpoints and the remains of killed saves."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import (
    Leftover,
    Retention,
    iteration_folder,
    latest_iteration,
    leftovers,
    recover,
    remove_checkpoint,
    saved_iterations,
    was_healthy,
)
from megazero.checkpoint.locate import bytes_in, is_checkpoint, no_checkpoint
from megazero.checkpoint.lock import WriterLock
from megazero.checkpoint.reader import CheckpointReader, Verify
from megazero.checkpoint.remote.disk import disk_for
from megazero.checkpoint.remote.mirror import local_folder
from megazero.commands.show import one_line, size_text
from megazero.errors import CheckpointError, ConfigError


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the flags of `prune`."""
    parser = verbs.add_parser(
        "prune",
        help="remove old checkpoints and what killed saves left",
        description="Remove all checkpoints of a run but the newest ones, and what killed saves left. The "
        "one that the run's file names stays, and so does the newest that is whole by the sizes of its "
        "files, and the newest of a healthy run. Refused while a job saves there.",
    )
    parser.add_argument("path", metavar="DIR", help="folder of a run")
    parser.add_argument("--keep-last", type=int, required=True, metavar="K", help="keep the K newest")
    parser.add_argument("--keep-every", type=int, metavar="N", help="keep multiples of N too")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.set_defaults(run=run, trouble=1)


@dataclass(frozen=True)
class PrunePlan:
    """The files and folders to remove.

    Attributes:
        leftovers: remains of killed saves.
        iterations: the iterations of the checkpoints to remove, oldest first.
    """

    leftovers: tuple[Leftover, ...]
    iterations: tuple[int, ...]


def run(flags: argparse.Namespace) -> int:
    """Remove what `plan` chooses, and print a line for each file or folder."""
    directory = local_folder(flags.path)
    for name in ("keep_last", "keep_every"):
        if (value := getattr(flags, name)) is not None and value < 1:
            raise ConfigError(f"`--{name.replace('_', '-')}` must be at least 1, but is {value}; raise it")
    if is_checkpoint(directory):
        raise CheckpointError(
            f"`{directory}` must be the folder of a run, but is a checkpoint; name its parent"
        )
    try:
        disk = None if flags.dry_run else disk_for(directory)
        lock = WriterLock(directory, disk)
        try:
            freed = prune(directory, Retention(flags.keep_last, flags.keep_every), disk)
        finally:
            lock.release()
    except OSError as error:
        raise CheckpointError(f"`{directory}` must be writable, but is not: {error}") from error
    print(f"{'would free' if flags.dry_run else 'freed'} {size_text(freed)}")
    return 0


def prune(directory: Path, retention: Retention, disk: Disk | None) -> int:
    """Remove what `plan` chooses, or only print it if `disk` is None; returns the bytes freed.

    The caller holds the folder's lock.

    Raises:
        CheckpointError: as for `plan`.
        OSError: the disk refuses.
    """
    removals = plan(directory, retention)
    freed = 0
    for leftover in removals.leftovers:
        if leftover.restored is not None:
            _say("restore" if disk is None else "restored", leftover.restored)
        else:
            freed += (size := bytes_in(leftover.path))
            _say("remove" if disk is None else "removed", leftover.path, size)
    if disk is not None:
        recover(disk, directory)
    for iteration in removals.iterations:
        folder = iteration_folder(directory, iteration)
        freed += (size := bytes_in(folder))
        if disk is not None:
            remove_checkpoint(disk, directory, iteration)
        _say("remove" if disk is None else "removed", folder, size)
    return freed


def plan(directory: Path, retention: Retention) -> PrunePlan:
    """Choose what to remove. The newest whole checkpoint always stays.

    Raises:
        CheckpointError: there is no checkpoint, or some would be removed although none is whole.
    """
    left = tuple(leftovers(directory))
    saved = saved_iterations(directory)
    if not (left or saved):
        raise no_checkpoint(directory)
    going = retention.superseded(saved, latest_iteration(directory), partial(was_healthy, directory))
    if going:
        newest_first = reversed(saved)
        whole = next((it for it in newest_first if _is_whole(iteration_folder(directory, it))), None)
        if whole is None:
            raise CheckpointError(
                f"`{directory}` must hold a whole checkpoint before others are removed, but has none; look "
                "at it with `megazero checkpoint verify`"
            )
        going = [iteration for iteration in going if iteration != whole]
    return PrunePlan(left, tuple(going))


def _is_whole(folder: Path) -> bool:
    try:
        CheckpointReader(folder, verify=Verify.SIZE)
    except CheckpointError:
        return False
    return True


def _say(what: str, path: Path, size: int | None = None) -> None:
    print(f"{what:<9} {one_line(path)}" + ("" if size is None else f"  {size_text(size)}"))
