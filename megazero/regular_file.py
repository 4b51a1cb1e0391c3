"""Open regular files only: opening a FIFO waits for its writer forever, and /dev/zero has no end."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading; never waits, whatever the path is.

    Raises:
        OSError: the system refuses; or the path is no regular file: errno is then EINVAL, and `strerror` says
            what it is, such as "it is a FIFO, not a regular file".
        IsADirectoryError: the path is a folder, as for `open`.
    """
    _refuse_others(os.stat(path).st_mode, path)  # before opening, because to open a device may have effects
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _refuse_others(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: as for `open_regular`.
    """
    with open_regular(path) as file:
        return file.read()


def read_regular_text(path: str | Path) -> str:
    """Return the text of a regular UTF-8 file, with "\\n" as every line's end, as `Path.read_text` does.

    Raises:
        OSError: as for `open_regular`.
        UnicodeDecodeError: it is not UTF-8.
    """
    with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
        return file.read()


def why_unreadable(error: OSError) -> str:
    """Say why a file could not be read, and what to do if the path was a shell's ``<(COMMAND)``."""
    advice = "; write its content to a file and name that" if error.errno == errno.EINVAL else ""
    return f"{error.strerror}{advice}"


def _refuse_others(mode: int, path: str | Path) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = next((name for has, name in _KINDS if has(mode)), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
