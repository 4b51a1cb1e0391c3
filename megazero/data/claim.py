"""One writer at a time for each output, and no remains of those that were killed.

Whoever writes an output holds a lock (flock) on `.NAME.lock` beside it, which the system releases when the
process ends, however it ends. So whoever gets the lock knows that all temporary files of that output are
left over, and removes them. Where a file system has no such locks nothing is refused and nothing removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import IO

from megazero.errors import DataError
from megazero.file_lock import this_process, try_lock


def temporary_path(output: str | Path, suffix: str = "") -> Path:
    """A name beside `output` that nothing has, and that `OutputClaim` knows as temporary."""
    output = Path(output)
    return output.with_name(f"{_start(output)}{os.getpid()}-{secrets.token_hex(4)}{suffix}")


class OutputClaim:
    """The right to write an output, until `release`. The folder above it must exist.

    output: the path of a file or folder, or the prefix of several files. What killed processes left of it is
    removed. Raises DataError, naming the process, if another one writes it; OSError if the disk refuses.
    """

    def __init__(self, output: str | Path):
        self._output = Path(output)
        self._path = self._output.with_name(f".{self._output.name}.lock")
        self._file = self._locked()
        if self._file is not None:
            self._remove_remains()

    def release(self) -> None:
        """Let others write; a second call does nothing."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._file.close()
            self._file = None

    def _locked(self) -> IO[bytes] | None:
        """The file, locked; None if there are no locks here."""
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
            # Its owner may have removed it between our opening and locking it.
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
