"""Where a user's path leads: to a local folder, or to the mirror of a URL in this host's cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megazero.checkpoint.disk import Disk
from megazero.storage.urls import Url, is_url

_ONE = re.compile("iter_[0-9]{7,18}")


def mirror_root() -> Path:
    """The folder of all mirrors of this host."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "megazero" / "mirror"


def in_mirror(path: str | Path) -> bool:
    """Whether a path is a mirror, or below one."""
    return str(path).startswith(f"{mirror_root()}{os.sep}")


def url_of(path: Path) -> Url:
    """The URL of what is at a path in a mirror."""
    scheme, bucket, *key = path.relative_to(mirror_root()).parts
    return Url(scheme, bucket, "/".join(key))


def local_path(given: str | Path) -> Path:
    """A path as it is; for a URL its mirror, which may be out of date.

    Raises:
        StorageError: the URL has an unknown scheme, or no bucket.
    """
    if not is_url(given):
        return Path(given)
    url = Url.parse(str(given))
    return mirror_root() / url.scheme / url.bucket / url.key


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


def put_file(path: Path) -> None:
    """Put a file that a command wrote into a run's folder, if that is a mirror.

    Raises:
        CheckpointError: it cannot be put.
    """
    if in_mirror(path):
        from megazero.checkpoint.remote.disk import put_file

        put_file(path)


def disk_for(folder: Path) -> Disk:
    """What makes the changes in a run's folder, or on object storage if that is a mirror."""
    if not in_mirror(folder):
        return Disk()
    from megazero.checkpoint.remote.disk import RemoteDisk

    return RemoteDisk(folder)
