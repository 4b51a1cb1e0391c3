"""The files of an indexed dataset in a store: the index is copied, the tokens are fetched block by block."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megazero.errors import DataError
from megazero.storage.blocks import BLOCK, ObjectBlocks
from megazero.storage.cached import Cache
from megazero.storage.objects import Item, MissingObjectError, Objects
from megazero.storage.urls import Url, is_url


class StoredDataset:
    """A dataset whose prefix is a URL.

    prefix: the URL; cache: where copies and blocks are kept; sum_block: bytes of a block of the `.sum`, None
    not to compare it. blocks: the bytes of the `.bin`; compares: whether blocks are those of the `.sum`.
    Raises StorageError if there is no such dataset.
    """

    def __init__(self, prefix: str, cache: Cache, sum_block: int | None):
        self.cache, self.url = cache, Url.parse(prefix)
        objects, items, self._name = _files(self.url)
        self._bin = items[".bin"]
        small = [item for suffix, item in items.items() if suffix != ".bin"]
        self._folder = cache.together(objects, list(items.values()), small)
        self.compares = sum_block is not None and ".sum" in items and self._bin.size <= cache.bytes
        self.blocks = ObjectBlocks(
            objects, self._bin, cache, sum_block if self.compares and sum_block else BLOCK
        )
        self.notes: tuple[str, ...] = ()
        if sum_block is not None and ".sum" in items and not self.compares:
            self.notes = (
                f"{prefix} is larger than --object-storage-cache-gib, so small blocks are fetched, which are "
                "not compared with the checksums of its .sum.",
            )

    @property
    def tag(self) -> str:
        """The tag of the `.bin`."""
        return self._bin.tag

    def path(self, suffix: str) -> Path:
        """The path of the local copy of the `.idx`, `.sum` or `.mask`, if there is one."""
        return self._folder / f"{self._name}{suffix}"

    def changed(self) -> list[str]:
        """A clause if the `.bin` is another object by now."""
        return [f"{self.url}.bin was replaced in the store"] if self.blocks.replaced() else []


def opened(prefix: str, cache: Cache | None, sum_block: int | None) -> tuple[str, StoredDataset | None]:
    """A prefix, and its dataset if it is a URL; without a cache, the prefix of a copy, if there is room."""
    if not is_url(prefix):
        return prefix, None
    if cache is not None:
        return prefix, StoredDataset(prefix, cache, sum_block)
    cache = Cache()
    objects, items, name = _files(Url.parse(prefix))
    if items[".bin"].size > cache.bytes:
        raise DataError(
            f"`{prefix}.bin` must fit into a cache of {cache.gib:g} GiB to be looked at whole, but is "
            f"{items['.bin'].size / (1 << 30):.1f} GiB; copy the dataset to a disk."
        )
    return str(cache.together(objects, list(items.values()), list(items.values())) / name), None


def _files(url: Url) -> tuple[Objects, dict[str, Item], str]:
    objects, items = Objects(url.parent), {}
    try:
        for suffix in (".idx", ".bin"):
            items[suffix] = objects.item(f"{url.name}{suffix}")
    except MissingObjectError:
        next(objects.names(deep=False), None)  # raises the better error where there is no such bucket
        raise
    for suffix in (".sum", ".mask"):
        with contextlib.suppress(MissingObjectError):
            items[suffix] = objects.item(f"{url.name}{suffix}")
    return objects, items, url.name
