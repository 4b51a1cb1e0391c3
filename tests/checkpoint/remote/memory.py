"""Objects in memory, whose every request a test can see, stop or delay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megazero.errors import StorageError
from megazero.storage.objects import Item, LostRaceError, MissingObjectError, Objects
from megazero.storage.urls import Url


@dataclass
class Store:
    """Objects by key -> content and tag. `before` and `after` are called with each request, as "put KEY"."""

    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    before: Callable[[str], None] = lambda request: None
    after: Callable[[str], None] = lambda request: None
    tags: Iterator[int] = field(default_factory=itertools.count)

    def quiet(self) -> None:
        """Call nothing any more."""
        self.before = self.after = lambda request: None

    def write(self, key: str, content: bytes) -> str:
        self.objects[key] = bytes(content), str(next(self.tags))
        return self.objects[key][1]


class MemoryObjects(Objects):
    """The objects of a store below a URL."""

    def __init__(self, url: Url, store: Store):
        self.url, self.store = url, store

    def _do(self, what: str, name: str, work: Callable[[str], object]):
        key = (self.url / name).key
        self.store.before(f"{what} {key}")
        result = work(key)
        self.store.after(f"{what} {key}")
        return result

    def _there(self, key: str) -> tuple[bytes, str]:
        if key not in self.store.objects:
            raise MissingObjectError(f"`{key}` is missing")
        return self.store.objects[key]

    def read(self, name: str) -> tuple[bytes, str]:
        return self._do("read", name, self._there)

    def tag(self, name: str) -> str:
        return self.read(name)[1]

    def ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[memoryview]:
        content = self.read(name)[0]
        return [memoryview(content)[start:end] for start, end in zip(starts, ends, strict=True)]

    def names(self, below: str = "") -> Iterator[Item]:
        def work(key: str) -> list[Item]:
            top = f"{self.url.key}/"
            return [
                Item(other.removeprefix(top), len(content), tag)
                for other, (content, tag) in self.store.objects.items()
                if other.startswith(f"{key}/")
            ]

        yield from self._do("list", below, work)

    def put(self, name: str, content: bytes | Path) -> str:
        return self._do("put", name, lambda key: self.store.write(key, content))

    def create(self, name: str, content: bytes) -> str:
        return self._do("create", name, lambda key: self._if(key, content, None))

    def swap(self, name: str, content: bytes, tag: str) -> str:
        return self._do("swap", name, lambda key: self._if(key, content, tag))

    def _if(self, key: str, content: bytes, tag: str | None) -> str:
        there = self.store.objects.get(key, (b"", None))
        if there[1] != tag:
            raise LostRaceError(f"`{key}` was written by another")
        return self.store.write(key, content)

    def delete(self, names: Sequence[str]) -> None:
        def work(_: str) -> None:
            for name in names:
                self.store.objects.pop((self.url / name).key, None)

        if names:
            self._do("delete", names[0], work)


class FailAt:
    """Lets request `number` of some kinds fail, before it is carried out or, if `done`, its answer lost."""

    def __init__(self, store: Store, number: int, done: bool, kinds: tuple[str, ...]):
        self.number, self.done, self.kinds = number, done, kinds
        self.count, self.failed = 0, False
        store.before, store.after = self.before, self.after

    def before(self, request: str) -> None:
        self.count += request.startswith(self.kinds)
        if not self.done and self.count == self.number + 1 and not self.failed:
            self.fail()

    def after(self, request: str) -> None:
        if self.done and self.count == self.number + 1 and not self.failed:
            self.fail()

    def fail(self) -> None:
        self.failed = True
        raise StorageError("the store does not answer")


class StopAt:
    """Stops the store from answering: request `number` and all later ones fail, as after a kill.

    With `done`, that request is carried out first, and only its answer is lost.
    """

    def __init__(self, store: Store, number: int, done: bool):
        self.number, self.done, self.count, self.stopped = number, done, 0, False
        store.before, store.after = self.before, self.after

    def before(self, request: str) -> None:
        if self.count >= self.number + self.done:
            self.fail()
        self.count += 1

    def after(self, request: str) -> None:
        if self.done and self.count > self.number:
            self.fail()

    def fail(self) -> None:
        self.stopped = True
        raise StorageError("the store does not answer")
