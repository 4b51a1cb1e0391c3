"""The files of a dataset that is trained on stay what they were: damaged blocks, cut and changed files.

A file is mapped, so what another process does to it happens under the training. A byte that changes is read
as another token; an access behind the end of a file that was cut ends the process with SIGBUS, without a
word. So `before_use` looks at the sizes before anything is read, which leaves a window of microseconds, and
compares each block of the `.bin` with its recorded sum when one of its tokens is first used. `changed` says
what became of the files since they were opened.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from megazero.data.indexed.checksum import TokenBlocks
from megazero.errors import DataError


@dataclass(frozen=True)
class FileState:
    """The facts that tell one file from another. size: in bytes; modified: time of the last change in ns."""

    size: int
    modified: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState | None:
        """The state of a file; None if it cannot be looked at."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    def difference(self, now: FileState | None) -> str:
        """Say how a file that was so differs `now`, as a clause without its subject."""
        if now is None:
            return f"is gone or cannot be read, and was {self.size} bytes"
        if now.size != self.size:
            return f"is {now.size} bytes, and was {self.size}"
        if now.modified != self.modified:
            return f"was written to at {_time(now.modified)}, and before that at {_time(self.modified)}"
        return f"is another file of the same size and time (inode {now.inode}, and was {self.inode})"


class Guard:
    """Watches over the files of one dataset. Several threads may use it at once.

    prefix: the dataset's; files: each file's state when it was opened, empty to watch over nothing; blocks:
    the blocks of the `.bin`, None if there are no sums.
    """

    def __init__(self, prefix: str, files: Mapping[Path, FileState | None], blocks: TokenBlocks | None):
        self.prefix = prefix
        self._files = dict(files)
        self._blocks = blocks
        # Threads that meet a block together check it twice, which does no harm.
        self._checked = bytearray(0 if blocks is None else len(blocks))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a user should read at the start: that there are no sums, and how to write them."""
        if not self._files or self._blocks is not None:
            return ()
        return (
            f"{self.prefix} has no checksums, so damage to its tokens would not be seen; write them with: "
            f"{sums_command(self.prefix)}",
        )

    def before_use(self, spans: Callable[[], tuple[np.ndarray, np.ndarray]]) -> None:
        """Check the files; called before tokens are read.

        spans: gives their bytes in the `.bin`, those from begins[i] up to ends[i], both int64 [n]. It is not
        called once all blocks are known to be sound. Raises DataError if a file is shorter than when it was
        opened, or a block is damaged.
        """
        for path, then in self._files.items():
            now = FileState.of(path)
            if then is not None and (now is None or now.size < then.size):
                raise DataError(
                    f"`{path}` must stay as it is while it is trained on, but {then.difference(now)}; put "
                    "the file back and resume."
                )
        if self._blocks is not None and 0 in self._checked:
            for number in self._blocks.covering(*spans()):
                if not self._checked[number]:
                    self._blocks.check(number)
                    self._checked[number] = 1

    def changed(self) -> list[str]:
        """A clause for each file that is not what it was when it was opened, beginning with its path."""
        changes = []
        for path, then in self._files.items():
            now = FileState.of(path)
            if then is not None and now != then:
                changes.append(f"{path} {then.difference(now)}")
        return changes


def sums_command(prefix: str) -> str:
    """The command that writes the checksums of a dataset."""
    return f"python data_tools/inspect_dataset.py {shlex.quote(prefix)} --write-sums"


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
