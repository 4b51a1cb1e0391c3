"""The file with a blend, watched by one rank."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from megazero.config.compat.blends import blend_in
from megazero.data.blended import parse_blend
from megazero.data.changing.history import Origin
from megazero.errors import DataError
from megazero.regular_file import read_regular_text, why_unreadable


@dataclass(frozen=True)
class Written:
    """The blend that a file holds: weights and prefixes, and where they are from."""

    words: tuple[str, ...]
    origin: Origin


def read_blend(path: Path) -> Written:
    """Read the training's blend. Raises DataError for a file that is not there or has no blend."""
    try:
        text, owner = read_regular_text(path), os.stat(path).st_uid
    except (OSError, UnicodeDecodeError) as error:
        why = why_unreadable(error) if isinstance(error, OSError) else error
        raise DataError(f"a file with a blend must be readable text, but {path} is not: {why}.") from error
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    origin = Origin(file=str(path), digest=digest, owner=_name_of(owner), time=now)
    return Written(blend_in(text, "train", path), origin)


def _name_of(owner: int) -> str:
    try:
        import pwd  # not on Windows

        return pwd.getpwuid(owner).pw_name
    except (ImportError, KeyError):
        return str(owner)


class BlendFile:
    """Notices a new blend in a file. A look at a file that rests costs one `stat`.

    words: the blend in use. problem: why the file's blend cannot be used; None while it can.
    """

    def __init__(self, path: Path, words: tuple[str, ...]):
        self.path, self._name, self.words = path, str(path), words
        self.problem: str | None = None
        self._seen: tuple[int, ...] | None = None
        self._read: tuple[int, ...] | None = None

    def look(self) -> Written | None:
        """A blend that is new, once the file has rested from one look to the next."""
        try:
            state = os.stat(self._name)
        except OSError as error:
            self.problem = why_unreadable(error)
            self._read = None
            return None
        now = (state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino)
        if now == self._read or now != self._seen:
            self._seen = now  # if it is new, it may still be being written
            return None
        self._read = now
        return self._content()

    def again(self) -> None:
        """Read the file at the next look, even if it stays as it is."""
        self._read = None

    def _content(self) -> Written | None:
        try:
            written = read_blend(self.path)
            if parse_blend(written.words)[0][0] is None:
                raise DataError(
                    f"a blend that changes must have weights, but {self.path} has none; add them."
                )
        except (DataError, RecursionError) as error:
            self.problem = str(error)
            return None
        self.problem = None
        return None if written.words == self.words else written
