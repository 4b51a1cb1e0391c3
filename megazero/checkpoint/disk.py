"""`Disk`: every change that checkpoints make to the file system.

That a checkpoint is at any moment either whole or invisible depends on the order of a few changes. All go
through one object, so that a test can count them, stop after any of them, and make any of them fail.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_SENT_BYTES = 8 << 20
_Filled = TypeVar("_Filled")


class File:
    """A new file, written unbuffered from beginning to end.

    Bytes go to the medium while later ones are still being written.

    Args:
        path: the file, which must not exist yet, not even as a link.
    """

    def __init__(self, path: Path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o666)
        self._written = 0
        self._sent = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`, a view of bytes."""
        data = memoryview(data)
        while data:
            count = os.write(self._descriptor, data)
            data = data[count:]
            self._written += count
        if self._written - self._sent >= _SENT_BYTES:
            self._send()

    def sync(self) -> None:
        """Return when everything written is on the medium."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self) -> None:
        # Saying that pages are not needed makes Linux start to write them out, without waiting for it, so
        # that `sync` has little left to do. Once on the medium, they make room for what is needed.
        if hasattr(os, "posix_fadvise"):
            length = self._written - self._sent
            os.posix_fadvise(self._descriptor, self._sent, length, os.POSIX_FADV_DONTNEED)
        self._sent = self._written


class Disk:
    """A POSIX file system. Its OSErrors are raised unchanged.

    `make_folder`, `create`, `rename`, `sync_folder`, `remove_file` and `remove_folder` are one change
    each, and so is each call of a `File`. The other methods are built from them.
    """

    def make_folder(self, path: Path) -> None:
        """Make one folder, which must not exist yet; its parent must."""
        os.mkdir(path)

    def create(self, path: Path) -> File:
        """Make a file, which must not exist yet, not even as a link."""
        return File(path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically. A file replaces one called `new`; a folder needs that name free.

        Raises:
            FileExistsError: `old` is a folder, and `new` exists.
        """
        # rename(2) would replace an empty folder.
        if _is_folder(old) and os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        os.rename(old, new)

    def sync_folder(self, path: Path) -> None:
        """Return when the entries of a folder are on the medium, if its file system supports that."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        except OSError as error:
            # Some file systems have no fsync of folders: entries are written through, or never for certain.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(folder)

    def remove_file(self, path: Path) -> None:
        """Remove a file, or a link but not its target."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def claim(self, identity: str) -> str:
        """Begin to own a run's folder whose local lock is held; returns the folder's identity."""
        return identity

    def release(self) -> None:
        """End to own the folder."""

    def begin(self, folder: Path, save: str) -> None:
        """Note the random name of the save that writes into a hidden folder; every rank calls this."""

    def make_parents(self, path: Path) -> None:
        """Make a folder and its missing parents, and put their names on the medium."""
        if path.is_dir():
            return
        self.make_parents(path.parent)
        try:
            self.make_folder(path)
        except FileExistsError:
            if not path.is_dir():  # another process may have been faster
                raise
        self.sync_folder(path.parent)

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or a folder with all that is in it; links are not followed."""
        if not _is_folder(path):
            self.remove_file(path)
            return
        for name in sorted(os.listdir(path)):
            self.remove(path / name)
        self.remove_folder(path)

    def write_text(self, path: Path, text: str) -> None:
        """Replace the content of a small file atomically; the new content is on the medium on return.

        If a step fails, the old content stays and nothing else is left. A process that is killed may leave a
        hidden file beside it.
        """
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with self.create(aside) as file:
                file.write(text.encode())
                file.sync()
            self.rename(aside, path)
            self.sync_folder(path.parent)
        except OSError:
            # The first failure says more than a failure to clean up after it.
            with contextlib.suppress(OSError):
                self.remove_file(aside)
            raise


def appear(disk: Disk, out: Path, fill: Callable[[Path], _Filled]) -> _Filled:
    """Let `fill` write into a hidden folder beside `out`, rename that to `out`, and return `fill`'s result.

    If that fails, nothing is left. An empty folder at `out`, or a link to one, is replaced.
    """
    aside = out.with_name(f".{out.name}.partial")
    disk.make_parents(out.parent)
    if aside.exists():  # left by a process that was killed
        disk.remove(aside)
    disk.make_folder(aside)
    try:
        filled = fill(aside)
        disk.sync_folder(aside)
        if out.is_dir():
            (disk.remove_file if out.is_symlink() else disk.remove_folder)(out)
        disk.rename(aside, out)
    except BaseException:
        # The first failure says more than a failure to clean up after it.
        with contextlib.suppress(OSError):
            disk.remove(aside)
        raise
    disk.sync_folder(out.parent)
    return filled


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
