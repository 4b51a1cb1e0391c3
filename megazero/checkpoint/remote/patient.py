"""Objects whose requests are repeated where the library does not repeat them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from megazero.storage.objects import Item, Objects, PassingError

_PAUSES = (0.1, 0.4, 1.6)  # seconds between attempts
_Result = TypeVar("_Result")


class PatientObjects(Objects):
    """Objects whose answers may be cut, and whose conditional writes may end with the connection.

    Such a write may be repeated: what is there already is compared with its content.
    """

    def tag(self, name: str) -> str:
        return _again(partial(super().tag, name))

    def read(self, name: str) -> tuple[bytes, str]:
        return _again(partial(super().read, name))

    def ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[memoryview]:
        return _again(partial(super().ranges, name, starts, ends))

    def names(self, below: str = "", *, deep: bool = True) -> Iterator[Item]:
        every = partial(super().names, below, deep=deep)
        yield from _again(lambda: list(every()))

    def put(self, name: str, content: bytes | Path) -> str:
        return _again(partial(super().put, name, content))

    def create(self, name: str, content: bytes) -> str:
        return _again(partial(super().create, name, content))

    def swap(self, name: str, content: bytes, tag: str) -> str:
        return _again(partial(super().swap, name, content, tag))

    def delete(self, names: Sequence[str]) -> None:
        _again(partial(super().delete, names))


def _again(request: Callable[[], _Result]) -> _Result:
    for pause in _PAUSES:
        try:
            return request()
        except PassingError:
            time.sleep(pause)
    return request()
