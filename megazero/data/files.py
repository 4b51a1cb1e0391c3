"""Output files: whole or absent, with one writer at a time for each output.

The writer of an output holds a lock (flock) on `.NAME.lock` beside it, which the system releases when the
process ends, however it ends. So whoever holds the lock knows that all temporary files of that output are
leftovers, and removes them. On a file system without such locks nothing is refused and nothing is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megazero.errors import DataError
from megazero.file_lock import this_process, try_lock


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name, replacing an old one, when the block ends without an error.

    Parent folders are made. Raises OSError if the disk refuses.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        with open(temporary, "xb") as file:
            yield file
            flush(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def flush(file: IO[bytes]) -> None:
    """Write the file's buffered bytes to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Write renames and removals in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_path(output: str | Path, suffix: str = "") -> Path:
    """An unused name beside `output`, which `OutputClaim` recognizes as temporary."""
    output = Path(output)
    return output.with_name(f"{_start(output)}{os.getpid()}-{secrets.token_hex(4)}{suffix}")


class OutputClaim:
    """The exclusive right to write an output, until `release`. Its parent folder must exist.

    output: the path of a file or folder, or the prefix of several files. Temporary files that killed
    processes left are removed. Raises DataError, naming the process, if another process writes the output;
    OSError if the disk refuses.
    """

    def __init__(self, output: str | Path):
        self._output = Path(output)
        self._path = self._output.with_name(f".{self._output.name}.lock")
        self._file = self._locked()
        if self._file is not None:
            self._remove_remains()

    def release(self) -> None:
        """Let other processes write the output; a second call does nothing."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._file.close()
            self._file = None

    def _locked(self) -> IO[bytes] | None:
        """Open and lock the lock file; None if this file system has no locks."""
        while True:
            file = open(self._path, "a+b")  # noqa: SIM115 (closed by release)
            try:
                is_locked = try_lock(file.fileno())
            except BlockingIOError as error:
                with file:
                    file.seek(0)
                    holder = file.read(300).decode(errors="replace") or "another process"
                raise DataError(
                    f"`{self._output}` must be written by one process at a time, but {holder} writes it; "
                    "wait for that, or choose another output."
                ) from error
            except OSError:
                file.close()
                raise
            if not is_locked:
                file.close()
                self._path.unlink(missing_ok=True)
                return None
            # The previous owner may have removed the file after it was opened here and before it was locked.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                    break
            file.close()
        file.truncate(0)
        file.write(this_process().encode())
        file.flush()
        return file

    def _remove_remains(self) -> None:
        name = re.compile(re.escape(_start(self._output)) + r"\d+-\w+(\.\w+)?")
        for path in self._output.absolute().parent.iterdir():
            if not name.fullmatch(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()


def _start(output: Path) -> str:
    return f".{output.name}.tmp-"
