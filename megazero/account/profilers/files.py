"""The folder that profilers write to; a failed write gives a warning and does not end the run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path


class Folder:
    """Writes files atomically.

    Args:
        path: the folder, which is made when the first file is written.
        writes: whether this rank writes at all.
        warn: takes a warning; by default, print it to standard error.

    Attributes:
        written: bytes written so far.
        fails: whether a file could not be written, after which no more are.
    """

    def __init__(self, path: Path, writes: bool, warn: Callable[[str], None] | None = None):
        self.path = path
        self.writes = writes
        self.written = 0
        self.fails = False
        self._warn = warn or (lambda text: print(text, file=sys.stderr, flush=True))

    def write(self, name: str, content: bytes) -> Path | None:
        """Write a file; returns its path, or None if it was not written."""
        return self.make(name, lambda path: path.write_bytes(content))

    def make(self, name: str, write: Callable[[Path], object]) -> Path | None:
        """Let `write` make a file, which gets its `name` when it is whole; returns its path, or None.

        `write` raises OSError if it cannot write.
        """
        if not self.writes or self.fails:
            return None
        target = self.path / name
        partial = target.with_name(f".partial_{target.name}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write(partial)
            os.replace(partial, target)
            self.written += target.stat().st_size
        except OSError as error:
            self.fails = True
            with contextlib.suppress(OSError):
                partial.unlink()
            self._warn(
                f"warning: `{target}` must be written, but is not: {error.strerror or error}; make room "
                "there or set another `--profile-dir`; the training goes on, and its profilers write no more"
            )
            return None
        return target
