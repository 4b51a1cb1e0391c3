"""Detects damaged blocks, truncated files and changed files of a dataset during training.

The files are mapped, so a training sees what other processes do to them. A changed byte is read as another
token; an access past the end of a truncated file kills the process by SIGBUS, without a message. So
`before_use` checks the sizes before anything is read, which leaves a window of microseconds, and compares
each block of the `.bin` with its recorded checksum when a token of the block is first used. `changed` lists
the files that changed since they were opened.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from megazero.data.indexed.checksum import TokenBlocks
from megazero.errors import DataError
from megazero.storage.dataset import StoredDataset


@dataclass(frozen=True)
class FileState:
    """Facts that identify the content of a file. size: in bytes; modified: time of the last change in ns."""

    size: int
    modified: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState | None:
        """The state of a file; None if `stat` fails."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    def difference(self, now: FileState | None) -> str:
        """How the file differs `now`: a clause without its subject."""
        if now is None:
            return f"is gone or cannot be read, and was {self.size} bytes"
        if now.size != self.size:
            return f"is {now.size} bytes, and was {self.size}"
        if now.modified != self.modified:
            return f"was written to at {_time(now.modified)}, and before that at {_time(self.modified)}"
        return f"is another file of the same size and time (inode {now.inode}, and was {self.inode})"


class Guard:
    """Checks the files of one dataset. Several threads may use it at once.

    files: the state of each file when it was opened; empty to check nothing. blocks: those of the `.bin`, and
    of the `.mask` if there is one; none if there are no checksums. stored: the dataset's objects, if it is in
    a store.
    """

    def __init__(
        self,
        prefix: str,
        files: Mapping[Path, FileState | None],
        blocks: Sequence[TokenBlocks] = (),
        stored: StoredDataset | None = None,
    ):
        self.prefix = prefix
        self._stored = stored
        self._files = dict(files)
        self._blocks = blocks
        # Two threads may check the same block at the same time, which does no harm.
        self._checked = [bytearray(len(part)) for part in blocks]

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for the user if there are no checksums, with the command that writes them."""
        if not self._files or self._blocks:
            return () if self._stored is None else self._stored.notes
        return (
            f"{self.prefix} has no checksums, so damage to its tokens would not be seen; write them with: "
            f"{sums_command(self.prefix)}",
        )

    def using(self, spans: Callable[[], tuple[np.ndarray, np.ndarray]]) -> AbstractContextManager[object]:
        """`before_use`; while the block runs, the tokens stay, which a dataset in a store fetches first."""
        self.before_use(spans)
        return nullcontext() if self._stored is None else self._stored.blocks.using(spans)

    def before_use(self, spans: Callable[[], tuple[np.ndarray, np.ndarray]]) -> None:
        """Check the files before tokens are read.

        spans: returns the bytes of these tokens in the `.bin`, begins and ends int64 [n]; it is not called
        once all blocks have been checked. Raises DataError if a file is shorter than when it was opened, or
        if a block is damaged.
        """
        for path, then in self._files.items():
            now = FileState.of(path)
            if then is not None and (now is None or now.size < then.size):
                raise DataError(
                    f"`{path}` must stay as it is while it is trained on, but {then.difference(now)}; put "
                    "the file back and resume."
                )
        for blocks, checked in zip(self._blocks, self._checked, strict=True):
            if 0 in checked:
                for number in blocks.covering(*spans()):
                    if not checked[number]:
                        blocks.check(number)
                        checked[number] = 1

    def changed(self) -> list[str]:
        """A clause, beginning with the path, for each file that changed since it was opened."""
        changes = [] if self._stored is None else self._stored.changed()
        for path, then in self._files.items():
            now = FileState.of(path)
            if then is not None and now != then:
                changes.append(f"{path} {then.difference(now)}")
        return changes


def sums_command(prefix: str) -> str:
    """The command that writes the checksums of a dataset."""
    return f"megazero data inspect {shlex.quote(prefix)} --write-sums"


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
