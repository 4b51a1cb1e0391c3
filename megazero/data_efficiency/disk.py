"""Folders that are written whole or not at all, and errors that name the path."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megazero.data.files import OutputClaim, flush_folder, temporary_path
from megazero.errors import DataError


@contextmanager
def disk(path: str | Path) -> Iterator[None]:
    """Turn an OSError in the block, such as a full disk, into a DataError that names `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"`{path}` must be writable, but is not ({error.strerror or error}); free space or choose "
            "another folder. What is finished is kept."
        ) from error


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Make a scratch folder, whose files move to `folder` when the block ends without an error.

    Older files of the same names are replaced: .idx and .json files are removed first and arrive last, so
    that the files they describe exist whenever they do. Files that a killed process left are removed. Raises
    DataError if the disk refuses, or if another process writes the same folder.
    """
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        claim, scratch = OutputClaim(folder), temporary_path(folder)
        try:
            scratch.mkdir()
            yield scratch
            _move(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            claim.release()


def _move(scratch: Path, folder: Path) -> None:
    order = {".json": 2, ".idx": 1}
    files = sorted(
        (path for path in scratch.iterdir() if path.is_file()), key=lambda p: order.get(p.suffix, 0)
    )
    for path in reversed(files):
        if path.suffix in order:
            (folder / path.name).unlink(missing_ok=True)
    for path in files:
        os.replace(path, folder / path.name)
    flush_folder(folder)
