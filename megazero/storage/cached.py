"""Local copies of objects, made once per host: indexes, tokenizers, the files of a model's folder.

A copy is whole or not there, and stands under a name of its own for each content: an object that changes is
copied anew, and what has the old copy open keeps it. One process copies under a lock; the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megazero.errors import StorageError
from megazero.storage.objects import Item, MissingObjectError, Objects
from megazero.storage.urls import Url, is_url

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

CACHE_GIB = 64.0
_AT_ONCE = 4  # files of a folder
_SMALL, _WEIGHTS = (".json", ".txt", ".model", ".jinja"), ".safetensors"
"""The files of a model's folder that are read."""
_WITH_OTHERS = "tokenizer.json"
"""A file that is read together with those beside it."""


@dataclass(frozen=True)
class Cache:
    """Where a host keeps copies of objects.

    folder: None for the user's cache folder. gib: the most that blocks of token files may take; indexes,
    tokenizers and folders of models are not counted.
    """

    folder: str | None = None
    gib: float = CACHE_GIB

    @property
    def path(self) -> Path:
        """The folder."""
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(self.folder) if self.folder else Path(base).expanduser() / "megazero" / "objects"

    def beside(self, path: str) -> Path:
        """The folder that a file is in, or this one for a URL."""
        return self.path if is_url(path) else Path(path).parent

    @property
    def bytes(self) -> int:
        return int(self.gib * (1 << 30))

    def file(self, path: str) -> str:
        """The path of the local copy of an object, or of a folder's small files; a path is returned as it is.

        Raises StorageError if there is neither.
        """
        if not is_url(path):
            return path
        url = Url.parse(path)
        if url.name == _WITH_OTHERS:
            return str(Path(self.model_folder(str(url.parent))) / url.name)
        objects = Objects(url.parent)
        try:
            item = objects.item(url.name)
        except MissingObjectError:
            return self.model_folder(path)
        return str(self.together(objects, [item], [item]) / item.name)

    def local(self, settings: T, *fields: str) -> T:
        """Settings, a dataclass, with paths of local copies in those fields that are URLs of `file`."""
        paths = {name: getattr(settings, name) for name in fields}
        copies: dict[str, Any] = {name: path and self.file(path) for name, path in paths.items()}
        return replace(settings, **copies)

    def model_folder(self, path: str, *, weights: bool = False) -> str:
        """The path of the local copy of a model's or tokenizer's folder; a path is returned as it is.

        weights: copy safetensors, too. Raises StorageError if there is no such folder.
        """
        if not is_url(path):
            return path
        objects = Objects(Url.parse(path))
        items = [item for item in objects.names(deep=False) if item.name.endswith((*_SMALL, _WEIGHTS))]
        if not items:
            raise MissingObjectError(
                f"`{objects.url}` must be an object, or a folder with a model or a tokenizer, but is neither;"
                " check the URL."
            )
        chosen = [item for item in items if weights or not item.name.endswith(_WEIGHTS)]
        return str(self.together(objects, items, chosen))

    def together(self, objects: Objects, items: Sequence[Item], chosen: Sequence[Item]) -> Path:
        """A folder with copies of those objects that are chosen of `items`, which make its name."""
        folder = self.path / "files" / key_of(objects.url, items)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda item: _copy(objects, item, folder / item.name), chosen))
        return folder


def key_of(url: Url, items: Iterable[Item]) -> str:
    """A name for the present content of some objects below a URL, which a person recognizes."""
    digest = hashlib.blake2b(repr((str(url), sorted(items))).encode(), digest_size=12).hexdigest()
    return f"{re.sub('[^a-zA-Z0-9._-]+', '-', str(url))[:100]}-{digest}"


def _copy(objects: Objects, item: Item, path: Path) -> Path:
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(path.with_name(f".{path.name}.lock")):
            if not path.is_file():
                _download(objects, item, path)
    except OSError as error:
        raise disk_error(path, error) from error
    return path


def _download(objects: Objects, item: Item, path: Path) -> None:
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # of a process that was killed: the lock is held
    try:
        there = objects.download(item.name, part)
        if (there.size, there.tag) != (item.size, item.tag) or part.stat().st_size != item.size:
            raise StorageError(
                f"`{objects.url / item.name}` must stay as it is while it is copied, but was replaced; try "
                "again."
            )
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made if need be; the system frees it when the process ends."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def disk_error(path: Path, error: OSError) -> StorageError:
    """The error of a disk that refuses a copy."""
    return StorageError(
        f"`--object-storage-cache-path` must be a folder that can be written, but {path} cannot "
        f"({error.strerror or error}); make room, or give another folder."
    )
