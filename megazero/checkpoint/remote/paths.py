"""The mirror of a URL: a folder in this host's cache, a function of the URL alone."""

from __future__ import annotations

import os
from pathlib import Path

from megazero.storage.urls import Url


def mirror_of(url: Url) -> Path:
    """The folder that mirrors what is below a URL."""
    return mirror_root() / url.scheme / url.bucket / url.key


def in_mirror(path: str | Path) -> bool:
    """Whether a path is a mirror, or below one."""
    return str(path).startswith(f"{mirror_root()}{os.sep}")


def url_of(path: Path) -> Url:
    """The URL of what is at a path in a mirror."""
    scheme, bucket, *key = path.relative_to(mirror_root()).parts
    return Url(scheme, bucket, "/".join(key))


def mirror_root() -> Path:
    """The folder of all mirrors of this host."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "megazero" / "mirror"
