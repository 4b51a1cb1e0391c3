"""A stand-in for CUDA's graphs that takes memory as they do: from one pool, which reuses what has been freed.

While work is recorded, each operator of torch runs once as usual, and a block of the pool stands for every
storage that it makes. Once a storage has been freed, a later capture may be given its block. A replay runs
the recorded operators again, in the blocks alone, so it overwrites whatever lies in a block by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class Place:
    """A tensor in a block of the pool."""

    block: torch.UntypedStorage
    like: Tensor  # on the meta device: type, shape, strides, offset

    def tensor(self) -> Tensor:
        empty = torch.empty(0, dtype=self.like.dtype)
        return empty.set_(self.block, self.like.storage_offset(), self.like.shape, self.like.stride())


class Pool:
    """Blocks of memory, in use or free."""

    def __init__(self) -> None:
        self.used: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}
        self.free: list[torch.UntypedStorage] = []

    def collect(self) -> None:
        """Take back the blocks of storages that have been freed."""
        for key, (alive, block) in list(self.used.items()):
            if alive.expired():
                self.free.append(block)
                del self.used[key]

    def take(self, storage: torch.UntypedStorage) -> None:
        """Give a new storage the smallest free block that is large enough."""
        fitting = [block for block in self.free if block.nbytes() >= storage.nbytes()]
        block = min(fitting, key=lambda block: block.nbytes(), default=None)
        if block is None:
            block = torch.UntypedStorage(storage.nbytes()).fill_(0xFF)  # NaN in every floating type
        else:
            self.free.remove(block)
        self.used[storage._cdata] = StorageWeakRef(storage), block

    def place(self, value: Any) -> Any:
        """Where a tensor lies in the pool; tensors from elsewhere, and other values, stay what they are."""
        if not isinstance(value, Tensor):
            return value
        entry = self.used.get(value.untyped_storage()._cdata)
        if entry is None:
            return value.detach()
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return Place(entry[1], like.as_strided(value.shape, value.stride(), value.storage_offset()))


class Recorder(TorchDispatchMode):
    """Runs operators and notes them with the places of their tensors."""

    def __init__(self, pool: Pool):
        super().__init__()
        self.pool = pool
        self.calls: list[tuple[Callable[..., Any], Any, list[Place | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.pool.collect()
        given = (args, kwargs or {})
        places = tree_map(self.pool.place, given)
        known = {x.untyped_storage()._cdata for x in tree_leaves(given) if isinstance(x, Tensor)}
        results = func(*args, **(kwargs or {}))
        made: list[Place | None] = []
        for result in tree_leaves(results):
            new = isinstance(result, Tensor) and result.untyped_storage()._cdata not in known
            if new and result.untyped_storage()._cdata not in self.pool.used:
                self.pool.take(result.untyped_storage())
            made.append(self.pool.place(result) if new else None)
        self.calls.append((func, places, made))
        return results

    def replay(self) -> None:
        for func, places, made in self.calls:
            args, kwargs = tree_map(lambda x: x.tensor() if isinstance(x, Place) else x, places)
            results = tree_leaves(func(*args, **kwargs))
            for place, result in zip(made, results, strict=True):
                if place is not None:
                    place.tensor().copy_(result)


class PooledGraphs:
    """`Graphs` whose captures share a pool."""

    def __init__(self) -> None:
        self.pool = Pool()
        self._kept: list[Any] = []

    def capture(self, work):
        recorder = Recorder(self.pool)
        with recorder:
            results = work()
        self._kept.append(results)
        places = [self.pool.place(result) for result in results]

        def replay():
            with torch.no_grad():
                recorder.replay()

        return [place.tensor() if isinstance(place, Place) else place for place in places], replay
