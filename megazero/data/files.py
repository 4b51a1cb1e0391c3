"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name, replacing an old one, only when the block ends without an error.

    Folders above it are made. Raises OSError if the disk refuses.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            yield file
            flush(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def flush(file: IO[bytes]) -> None:
    """Return when the file's bytes are on the disk."""
    file.flush()
    os.fsync(file.fileno())
