"""A big object as an array of bytes, of which blocks are fetched when they are used.

All processes of a host share a sparse file of the object's size, which is mapped, and a table with a row for
each block: the checksum of a block that is there, when it was last used, and who fetches it. A block's row is
written after its bytes, so a process may be killed at any moment. Blocks that were used least recently make
room for others when the files together outgrow the cache. While tokens are read, a shared lock keeps the
blocks where they are; whoever makes room takes the lock alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import numpy as np

from megazero.errors import DataError, StorageError
from megazero.storage.cached import Cache, alone, disk_error, key_of
from megazero.storage.objects import Item, LostRaceError, MissingObjectError, Objects

Spans = Callable[[], tuple[np.ndarray, np.ndarray]]

BLOCK = 256 << 10
_AT_ONCE = 16  # requests
_RUN = 4 << 20  # bytes of one request
_HERE = 1 << 32  # beside a block's checksum: the block is there
_PATIENCE = 60  # seconds after which another process's fetch of a block counts as given up
_ROUNDS = 8
_SPARE = 0.95  # of the cache: what is left when room is made


class _Table:
    """The rows of an object's blocks, shared by all processes.

    turn: uint64 [1]: how often room was made. sums, used, claims: uint64 [n]: checksums, times, fetches.
    """

    def __init__(self, path: Path):
        rows = np.memmap(path, np.uint64, "r+").view(np.ndarray)
        self.turn, (self.sums, self.used, self.claims) = rows[:1], rows[1:].reshape(3, -1)


class ObjectBlocks:
    """An object's bytes. `array`, uint8 [size], holds only what `using` has asked for. Threads may share it.

    objects, item: the object; cache: where blocks are kept. block: bytes of a block. check: called with a
    block's number when its bytes have arrived, and raises an error if they are wrong.
    """

    def __init__(self, objects: Objects, item: Item, cache: Cache, block: int = BLOCK):
        self._objects, self._item, self._cache, self._block = objects, item, cache, block
        self.check: Callable[[int], None] = lambda number: None
        self._folder = cache.path / "blocks" / f"{key_of(objects.url, [item])}-{block >> 10}"
        self._count = -(-item.size // block)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / "content", "ab") as content, open(self._folder / "table", "ab") as table:
                content.truncate(item.size)
                rows = 1 + 3 * self._count
                os.posix_fallocate(table.fileno(), 0, 8 * rows)  # a map cannot say: disk full
            self._table = _Table(self._folder / "table")
            self._lock = open(self._folder / "lock", "ab")  # noqa: SIM115 (held as long as the object)
        except OSError as error:
            raise disk_error(self._folder, error) from error
        self.array = np.empty(0, np.uint8)
        if item.size:  # an empty file cannot be mapped
            self.array = np.memmap(content.name, np.uint8, "r").view(np.ndarray)
        self._mutex, self._holders = threading.Lock(), 0
        self._kept = contextlib.closing(SimpleNamespace(close=self._let_go))
        self._checked = np.zeros(self._count, dtype=bool)
        self._unchecked = self._count
        self._whole = -1  # how often room had been made when all blocks were there and checked
        self._stamped = 0.0

    def using(self, spans: Spans) -> AbstractContextManager[object]:
        """Fetch the bytes of some spans into `array`; they stay until the context that is returned ends.

        Raises StorageError if they cannot be fetched, DataError if the object was replaced.
        """
        table = self._table
        self._keep()
        if self._whole == int(table.turn[0]):
            if time.time() > self._stamped + _PATIENCE:
                self._stamped = time.time()
                table.used[:] = int(self._stamped)
            return self._kept
        self._let_go()
        numbers = self._numbers(*spans())
        fits = numbers.size * self._block <= self._cache.bytes
        for attempt in range(_ROUNDS if fits else 0):
            # When others take the room again and again, one is served after the other.
            turn = alone(self._cache.path / "turn.lock") if attempt > _ROUNDS // 2 else nullcontext()
            with turn:
                self._fetch(numbers)
                self._keep()
                if table.sums[numbers].all() and self._verify(numbers):
                    table.used[numbers] = int(time.time())
                    self._whole = int(table.turn[0]) if not self._unchecked and table.sums.all() else -1
                    return self._kept
                self._let_go()
        raise StorageError(
            f"`--object-storage-cache-gib` must hold what the ranks of a host read at once, but is "
            f"{self._cache.gib:g}; raise it."
        )

    def whole(self) -> np.ndarray:
        """A copy of all bytes, which are in the cache as far as it has room."""
        copy = np.empty_like(self.array)
        step = max(self._block, self._cache.bytes // 2 // self._block * self._block)
        for begin in range(0, copy.size, step):
            end = min(begin + step, copy.size)
            span = np.array([begin]), np.array([end])
            with self.using(lambda: span):  # noqa: B023 (called at once)
                copy[begin:end] = self.array[begin:end]
        return copy

    def bytes_at(self, begins: list[int], size: int) -> list[bytes]:
        """Some bytes straight from the store, without the cache."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda at: bytes(self._piece(at, at + size)), begins))

    def replaced(self) -> bool:
        """Whether the object is another by now, or gone."""
        try:
            return self._objects.item(self._item.name) != self._item
        except MissingObjectError:
            return True

    def _piece(self, begin: int, end: int) -> memoryview:
        try:
            return self._objects.piece(self._item.name, begin, end, self._item.tag)
        except LostRaceError:
            raise DataError(
                f"`{self._objects.url / self._item.name}` must stay as it is while it is trained on, but was "
                "replaced; put the object back and resume."
            ) from None

    def _numbers(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The numbers of the blocks that hold some spans, int64, ascending."""
        filled = ends > begins
        first, last = begins[filled] // self._block, (ends[filled] - 1) // self._block
        counts = last - first + 1
        return np.unique(
            np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        )

    def _keep(self) -> None:
        """Let nobody make room in the object, until `_let_go`."""
        with self._mutex:
            if not self._holders:
                fcntl.flock(self._lock, fcntl.LOCK_SH)
            self._holders += 1

    def _let_go(self) -> None:
        with self._mutex:
            self._holders -= 1
            if not self._holders:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _verify(self, numbers: np.ndarray) -> bool:
        """Whether blocks that this process uses for the first time have their checksums; forgets others."""
        fresh = numbers[~self._checked[numbers]].tolist()
        for number in fresh:
            begin, end = self._bounds(number)
            if int(self._table.sums[number]) == _HERE | crc32(self.array[begin:end].data):
                self._note_checked(number)
            else:
                self._table.sums[number] = 0
        return bool(self._checked[fresh].all())

    def _note_checked(self, number: int) -> None:
        with self._mutex:
            self._unchecked -= not self._checked[number]
            self._checked[number] = True

    def _bounds(self, number: int) -> tuple[int, int]:
        return number * self._block, min((number + 1) * self._block, self._item.size)

    def _fetch(self, numbers: np.ndarray) -> None:
        """Fetch the blocks that are not there, or wait until another process has fetched them."""
        sums, claims = self._table.sums, self._table.claims
        while (missing := numbers[sums[numbers] == 0]).size:
            now = int(time.time())
            free = missing[claims[missing] + _PATIENCE < now]
            if not free.size:
                time.sleep(0.005)
                continue
            # Two processes may claim a block at the same moment: both write the same bytes.
            claims[free] = now
            try:
                make_room(self._cache, free.size * self._block)
                runs = self._runs(free)
                with ThreadPoolExecutor(min(_AT_ONCE, len(runs))) as pool:
                    list(pool.map(self._fetch_run, runs))
            finally:
                claims[free] = 0

    def _runs(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Neighbouring blocks, which one request fetches."""
        per_run = max(1, _RUN // self._block)
        ends = (np.diff(numbers) > 1) | (numbers[1:] % per_run == 0)
        return np.split(numbers, np.flatnonzero(ends) + 1)

    def _fetch_run(self, numbers: np.ndarray) -> None:
        begin, end = self._bounds(int(numbers[0]))[0], self._bounds(int(numbers[-1]))[1]
        piece = self._piece(begin, end)
        self._keep()
        with self._kept:
            try:
                with open(self._folder / "content", "r+b") as file:
                    os.pwrite(file.fileno(), piece, begin)
            except OSError as error:
                raise disk_error(self._folder, error) from error
            for number in numbers.tolist():
                first, last = self._bounds(number)
                self.check(number)
                self._note_checked(number)
                self._table.sums[number] = _HERE | crc32(piece[first - begin : last - begin])


def make_room(cache: Cache, size: int) -> None:
    """Give up the blocks that were used least recently, until `size` more bytes are within the cache."""
    # A table is made after its content, and is empty for a moment.
    folders = [table.parent for table in (cache.path / "blocks").glob("*/table") if table.stat().st_size]
    taken = sum((folder / "content").stat().st_blocks * 512 for folder in folders)
    if taken + size <= cache.bytes:
        return
    with alone(cache.path / "room.lock"):
        tables = [_Table(folder / "table") for folder in folders]
        present = [np.flatnonzero(table.sums) for table in tables]
        owners = np.repeat(np.arange(len(tables)), [len(numbers) for numbers in present])
        numbers = np.concatenate(present)
        order = np.argsort(
            np.concatenate([t.used[n] for t, n in zip(tables, present, strict=True)]), kind="stable"
        )
        blocks = np.array([int(folder.name.rpartition("-")[2]) << 10 for folder in folders])
        freed = np.cumsum(blocks[owners[order]])
        count = int(np.searchsorted(freed, taken + size - cache.bytes * _SPARE)) + 1
        gone = order[:count]
        for owner in np.unique(owners[gone]).tolist():
            _give_up(folders[owner], tables[owner], numbers[gone[owners[gone] == owner]], int(blocks[owner]))


def _give_up(folder: Path, table: _Table, numbers: np.ndarray, block: int) -> None:
    """Free the disk space of some blocks, when no process reads tokens."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(alone(folder / "lock"))
        file = stack.enter_context(open(folder / "content", "r+b"))
        content = stack.enter_context(mmap.mmap(file.fileno(), 0))
        table.turn += np.uint64(1)
        table.sums[numbers] = 0
        for begin in (numbers * block).tolist():
            content.madvise(mmap.MADV_REMOVE, begin, min(block, len(content) - begin))
