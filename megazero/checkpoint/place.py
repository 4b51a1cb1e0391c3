"""Where a user's path leads: to a local folder, or to the local mirror of one on object storage."""

from __future__ import annotations

import re
from pathlib import Path

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.remote.paths import in_mirror, mirror_of
from megazero.storage.urls import Url, is_url

_ONE = re.compile("iter_[0-9]{7,18}")


def local_path(given: str | Path) -> Path:
    """A path as it is; for a URL its mirror, which may be out of date.

    Raises:
        StorageError: the URL has an unknown scheme, or no bucket.
    """
    return mirror_of(Url.parse(str(given))) if is_url(given) else Path(given)


def local_folder(given: str | Path) -> Path:
    """As `local_path`; a mirror then has all checkpoints that are visible, with files to be fetched.

    Raises:
        CheckpointError: the URL cannot be read.
    """
    path = local_path(given)
    if in_mirror(path):
        from megazero.checkpoint.remote.mirror import refresh

        refresh(path.parent if _ONE.fullmatch(path.name) else path)
    return path


def local_file(path: Path) -> Path:
    """A file of a checkpoint, which is fetched if it lies in a mirror.

    Raises:
        CheckpointError: it cannot be fetched.
    """
    if in_mirror(path):
        from megazero.checkpoint.remote.mirror import fetch

        fetch(path)
    return path


def disk_for(folder: Path) -> Disk:
    """What makes the changes in a run's folder, or on object storage if that is a mirror."""
    if not in_mirror(folder):
        return Disk()
    from megazero.checkpoint.remote.disk import RemoteDisk

    return RemoteDisk(folder)
