"""URLs of objects, told from paths of files."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace

from megazero.errors import StorageError

SCHEMES = ("s3", "gs", "az", "https", "http", "msc")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def is_url(text: object) -> bool:
    """Whether a user's text is a URL, of whatever scheme, and no path of a file."""
    return _SCHEME.match(str(text)) is not None


def place_of(text: str) -> str:
    """An absolute path, or a URL as it is."""
    return text if is_url(text) else os.path.abspath(text)


@dataclass(frozen=True)
class Url:
    """An object, or the objects whose keys begin with `key`, of one of `SCHEMES`.

    bucket: the bucket, container, host or profile; key: without slashes at the ends, empty for all.
    """

    scheme: str
    bucket: str
    key: str = ""

    @classmethod
    def parse(cls, text: str) -> Url:
        """Read a URL. Raises StorageError if its scheme is unknown, or it has no bucket, or keys in it."""
        match = _SCHEME.match(text)
        scheme, rest = ("", text) if match is None else (match[1].lower(), match[2])
        if scheme not in SCHEMES:
            near = difflib.get_close_matches(scheme, SCHEMES, 1, 0.3)
            meant = f"did you mean {near[0]}://?" if near else "correct it."
            raise StorageError(
                f"`URL` must begin with {', '.join(f'{name}://' for name in SCHEMES)}, but is "
                f"{_without_secrets(text)}; {meant}"
            )
        bucket, _, key = rest.partition("/")
        if "@" in bucket or "?" in key:
            raise StorageError(
                f"`URL` must have no keys or passwords in it, but {_without_secrets(text)} has; give them by "
                "the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            )
        if not bucket:
            raise StorageError(f"`URL` must name a bucket, but is {text}; write {scheme}://BUCKET/PATH.")
        return cls(scheme, bucket, key.strip("/"))

    def __truediv__(self, name: str) -> Url:
        return replace(self, key=f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The URL without the last part of its key."""
        return replace(self, key=self.key.rpartition("/")[0])

    def with_suffix(self, suffix: str) -> Url:
        """The URL with another suffix, as of a path."""
        stem, dot, _ = self.name.rpartition(".")
        return self.parent / f"{stem if dot else self.name}{suffix}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")


def _without_secrets(text: str) -> str:
    """A URL without what stands before an @ or behind a question mark."""
    return re.sub(r"://[^/@]*@", "://...@", text).partition("?")[0]
