"""Turn a path that a user gives, of a run's folder or of one checkpoint, into a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from megazero.checkpoint.folder import candidates, iteration_folder, leftovers, saved_iterations
from megazero.checkpoint.manifest import MANIFEST
from megazero.checkpoint.remote.mirror import local_folder
from megazero.errors import CheckpointError


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one checkpoint, by its manifest or its name, and not a run's folder.

    Raises:
        CheckpointError: `path` is not a folder.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"`{path}` must be the folder of a run or of a checkpoint, but is "
            f"{'a file' if path.exists() else 'missing'}; check the path"
        )
    if (path / MANIFEST).exists():
        return True
    folder = path.resolve()
    return folder.name in {
        iteration_folder(folder, iteration).name for iteration in saved_iterations(folder.parent)
    }


def no_checkpoint(path: Path) -> CheckpointError:
    """The error for a run's folder without a checkpoint."""
    return CheckpointError(f"`{path}` must hold a checkpoint, but has none; check the path")


def checkpoints_of(path: Path) -> list[Path]:
    """The checkpoint at `path`, or all of a run: the visible ones, oldest first, then those set aside.

    Raises:
        CheckpointError: there is none.
    """
    if is_checkpoint(path):
        return [path]
    folders = [iteration_folder(path, iteration) for iteration in saved_iterations(path)]
    folders += [leftover.path for leftover in leftovers(path) if leftover.restored is not None]
    if not folders:
        raise no_checkpoint(path)
    return folders


def one_checkpoint(given: str | Path, step: int | None = None) -> Path:
    """The checkpoint at a path or URL, or the one of a run that a resume would take. Warns on standard error.

    Args:
        given: the folder of a run or, unless `step` is given, of a checkpoint.
        step: the iteration to take from a run's folder.

    Raises:
        CheckpointError: there is none.
    """
    path = local_folder(given)
    if step is None and is_checkpoint(path):
        return path
    loadable = candidates(path, step)
    if not loadable.folders:
        raise no_checkpoint(path)
    for remark in loadable.remarks:
        print(f"warning: {remark}", file=sys.stderr)
    return loadable.folders[0]


def bytes_in(path: Path) -> int:
    """The size of a file, or of all files in a folder; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        return sum(bytes_in(entry) for entry in path.iterdir())
    return path.lstat().st_size
