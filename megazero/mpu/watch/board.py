"""The board where the processes of a job leave notes for each other, outside any collective."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megazero.errors import CommunicationError

_PREFIX = "megazero/watch"


class Board(Protocol):
    """Notes that every process can leave and read; neither method waits for another process.

    Both raise `CommunicationError` if the notes cannot be reached. Several threads may call them.
    """

    def post(self, key: str, text: str) -> None:
        """Leave `text` under `key`."""

    def read(self, key: str) -> str | None:
        """The text left under `key`, or None."""


class StoreBoard:
    """A board in a key-value store of torch.distributed.

    Args:
        store: for example the world's. The board opens its own connection to it: otherwise a main thread that
            waits for a key in the store would keep the notes from getting through.
    """

    def __init__(self, store: dist.Store):
        self._store = store.clone()

    @classmethod
    def of_world(cls) -> StoreBoard:
        """A board in the store that the world was started with, which only this attempt of the job uses."""
        # torch has no public name for it.
        return cls(distributed_c10d._get_default_store())

    def post(self, key: str, text: str) -> None:
        try:
            self._store.set(f"{_PREFIX}/{key}", text)
        except RuntimeError as error:
            raise self._lost(error) from error

    def read(self, key: str) -> str | None:
        key = f"{_PREFIX}/{key}"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> CommunicationError:
        return CommunicationError(
            f"the job's key-value store, which the launcher or rank 0 keeps, is out of reach: {error}"
        )
