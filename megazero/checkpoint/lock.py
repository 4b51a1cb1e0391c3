"""The lock on a run's folder, and the folder's identity.

The system's lock belongs to a file, not to a name: when somebody deletes a folder and makes it anew, the next
job gets a fresh lock while the first one goes on. So before each change of the folder, the holder checks that
the file called `LOCK` is still the file that it has locked. Each checkpoint records the identity of the
folder that it was saved into, so a copy from elsewhere is recognized later too.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import warnings
from pathlib import Path

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import saved_iterations
from megazero.errors import CheckpointError, LostFolderError
from megazero.file_lock import this_process, try_lock

LOCK = ".lock"
FOLDER_FACT = "folder"
"""The key in a checkpoint's facts of the identity of the folder that it was saved into."""
_IDENTITY = re.compile(rb"^folder ([0-9a-f]{32})$", re.MULTILINE)
_LARGEST = 1000


class WriterLock:
    """The lock on a folder, which one job holds at a time; the system frees it when the process ends.

    On a file system without locks, a warning says so; `check` then notices another job after it has begun.

    Attributes:
        identity: a random name of the folder, kept in its lock file from job to job and when it is moved.

    Args:
        disk: keeps jobs of other hosts away where a file cannot.

    Raises:
        CheckpointError: another job holds the lock.
    """

    def __init__(self, directory: Path, disk: Disk | None = None):
        self._directory, self._disk = directory, disk or Disk()
        self._job = secrets.token_hex(16)
        self._file = self._folder = -1
        identity = self._open() or secrets.token_hex(16)
        try:
            self.identity = self._disk.claim(identity)
        except BaseException:
            self._free()
            raise
        self._content = self._sign()

    def check(self) -> None:
        """Raise unless the folder is still the one that this job has locked.

        A deleted lock file is made again if no other job can have written meanwhile, that is, if the folder
        is the same one or has no checkpoint.

        Raises:
            LostFolderError: the folder was made anew or replaced, and another job may write there.
            CheckpointError: the folder is gone.
            OSError: the system refuses.
        """
        try:
            there = os.lstat(self._directory / LOCK)
        except FileNotFoundError:
            self._take_again()
            return
        if not self._is_held(there):
            raise self._lost()

    def release(self) -> None:
        """Free the lock."""
        self._disk.release()
        self._free()

    def _free(self) -> None:
        for descriptor in (self._file, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._folder = -1

    def _open(self) -> str | None:
        """Lock the file called `LOCK`, and keep the folder open, so that no new folder gets its inode number.

        Returns:
            The folder's identity, if the file holds one.

        Raises:
            CheckpointError: another job holds the lock.
        """
        folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            file = _locked(self._directory)
        except BaseException:
            os.close(folder)
            raise
        self._free()
        self._file, self._folder = file, folder
        match = _IDENTITY.search(os.pread(file, _LARGEST, 0))
        return match[1].decode() if match else None

    def _is_held(self, there: os.stat_result) -> bool:
        try:
            same = os.path.samestat(there, os.fstat(self._file))
            return same and os.pread(self._file, _LARGEST, 0) == self._content
        except OSError as error:
            if error.errno != errno.ESTALE:  # deleted by another machine
                raise
            return False

    def _take_again(self) -> None:
        if not self._directory.is_dir():
            raise CheckpointError(
                f"`{self._directory}` must stay while a job saves there, but was deleted or moved; make it "
                "again, and the next checkpoint is saved there"
            )
        same = os.path.samestat(os.stat(self._directory), os.fstat(self._folder))
        if not same and saved_iterations(self._directory):
            raise self._lost()
        try:
            identity = self._open()
        except CheckpointError:
            raise self._lost() from None
        if identity is not None:  # another job was faster
            raise self._lost()
        self._content = self._sign()

    def _sign(self) -> bytes:
        """Write this job's name and the folder's identity into the lock file; return the content."""
        content = f"{this_process()}\nfolder {self.identity}\njob {self._job}\n".encode()
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))
        return content

    def _lost(self) -> LostFolderError:
        holder = _holder(self._directory / LOCK)
        return LostFolderError(
            f"`{self._directory}` must be written by one job at a time, but was deleted and made anew, or "
            f"replaced, while this job ran, and now belongs to {holder or 'another run'}; this job writes "
            "nothing more there: begin it again with another folder to save to"
        )


def saved_elsewhere(folder: Path, saved_into: str | None) -> str | None:
    """A warning that a checkpoint was saved into another folder than it is in now; None if nothing shows it.

    Args:
        folder: the checkpoint's folder.
        saved_into: the identity of the run's folder, as the checkpoint recorded it.
    """
    try:
        match = _IDENTITY.search(_content(folder.parent / LOCK))
    except OSError:
        return None
    if match is None or saved_into is None or match[1].decode() == saved_into:
        return None
    return f"{folder} was saved into another folder: it was copied to this one, or two jobs wrote here"


def _locked(directory: Path) -> int:
    """Open and lock a folder's lock file; return its descriptor.

    Raises:
        CheckpointError: another job holds the lock.
    """
    path = directory / LOCK
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        is_locked = try_lock(file)
    except BlockingIOError:
        os.close(file)
        raise CheckpointError(
            f"`{directory}` must be written by one job at a time, but {_holder(path) or 'another job'} does; "
            "end that job or save elsewhere"
        ) from None
    except OSError:
        os.close(file)
        raise
    if not is_locked:
        warnings.warn(
            f"the file system of `{directory}` has no locks: nothing keeps another job from writing there",
            stacklevel=2,
        )
    return file


def _holder(path: Path) -> str | None:
    """The process that holds a lock file, or held it last, as the file's first line says; None if empty."""
    try:
        first = _content(path).partition(b"\n")[0]
    except OSError:
        return None
    return first[:200].decode(errors="replace").strip() or None


def _content(path: Path) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(file, _LARGEST)
    finally:
        os.close(file)
