"""Files checked block by block: hashes made while writing, compared while reading.

A hash per block, not per file, lets a rank that needs a part of a file check what it reads and nothing else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64

from megazero.errors import DamagedCheckpointError

BLOCK = 4 << 20
# Bytes are hashed and moved in pieces of this size, so that the second of the two finds them in the cache.
PIECE = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """What is known of a file: its size in bytes, and the xxh3_64 of each block in hex; none if it was not hashed."""

    size: int
    blocks: tuple[str, ...]


class BlockHasher:
    """Hashes bytes that come in order, block by block."""

    def __init__(self, block_size: int = BLOCK):
        self._block_size = block_size
        self._size = 0
        self._done: list[str] = []
        self._hash = xxh3_64()

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        data = memoryview(data)
        while data:
            piece = data[: self._block_size - self._size % self._block_size]
            self._hash.update(piece)
            self._size += len(piece)
            if self._size % self._block_size == 0:
                self._done.append(self._hash.hexdigest())
                self._hash.reset()
            data = data[len(piece) :]

    def record(self) -> FileRecord:
        """Size and hashes of all that came."""
        last = (self._hash.hexdigest(),) if self._size % self._block_size else ()
        return FileRecord(self._size, (*self._done, *last))


class BlockFile:
    """An open file whose bytes are checked as they are read, for one thread at a time.

    Args:
        path: of a regular file, not a link.
        record: what it must be; without one, or with one that has no hashes, nothing is compared.
        verify: compare the hashes of blocks; the size is always compared.
        block_size: bytes per hash.

    Raises:
        DamagedCheckpointError: from all methods: the file is missing, cannot be read or is not as recorded.
    """

    def __init__(
        self, path: Path, record: FileRecord | None = None, *, verify: bool = True, block_size: int = BLOCK
    ):
        self.path = path
        self._block_size = block_size
        self._hashes = record.blocks if record is not None and verify else ()
        self._verified: set[int] = set()
        self._scratch = bytearray()
        self._scratch_block = -1
        with self._errors():
            # Without O_NONBLOCK, to open a pipe would wait for its writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            with self._errors():
                status = os.fstat(self._descriptor)
            self.size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                raise DamagedCheckpointError(f"`{path}` must be a file, but is something else")
            if record is not None and self.size != record.size:
                raise self.damage(f"it has {self.size} bytes instead of {record.size}")
            if self._hashes and len(self._hashes) != -(-self.size // block_size):
                raise self.damage(f"there are {len(self._hashes)} hashes for its {self.size} bytes")
        except BaseException:
            self.close()
            raise

    def damage(self, what: str) -> DamagedCheckpointError:
        """The error that says in words what is wrong with this file."""
        return DamagedCheckpointError(
            f"`{self.path}` must be as it was written, but {what}; use another checkpoint"
        )

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill `memory`, whose items are bytes, with as many bytes of the file from byte `start` on."""
        stop = start + len(memory)
        if start < 0 or stop > self.size:
            raise self.damage(f"bytes {start} to {stop} are not in its {self.size}")
        if not self._hashes:
            self._read(memory, start)
            return
        position = start
        while position < stop:
            block = position // self._block_size
            begin, end = self._range(block)
            until = min(end, stop)
            part = memory[position - start : until - start]
            if block != self._scratch_block and until - position == end - begin:
                self._read_block(part, block)
            else:
                self._read_part(part, block, position - begin)
            position = until

    def verify_all(self) -> None:
        """Read the file from its beginning to its end and compare all hashes."""
        buffer = memoryview(bytearray(min(PIECE, self._block_size)))
        for block in range(len(self._hashes)):
            begin, end = self._range(block)
            digest = xxh3_64()
            for position in range(begin, end, len(buffer)):
                piece = buffer[: min(len(buffer), end - position)]
                self._read(piece, position)
                digest.update(piece)
            self._compare(block, digest.hexdigest())

    def close(self) -> None:
        """Give the file back; again does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _range(self, block: int) -> tuple[int, int]:
        begin = block * self._block_size
        return begin, min(begin + self._block_size, self.size)

    def _read_part(self, memory: memoryview, block: int, offset: int) -> None:
        """Part of a block. Neighbours tend to be asked for next, so the block that was read for it is kept."""
        begin, end = self._range(block)
        if block != self._scratch_block:
            if block in self._verified:
                self._read(memory, begin + offset)
                return
            if not self._scratch:
                self._scratch = bytearray(min(self._block_size, self.size))
            self._scratch_block = -1
            self._read_block(memoryview(self._scratch)[: end - begin], block)
            self._scratch_block = block
        memory[:] = memoryview(self._scratch)[offset : offset + len(memory)]

    def _read_block(self, memory: memoryview, block: int) -> None:
        digest, start = xxh3_64(), self._range(block)[0]
        for offset in range(0, len(memory), PIECE):
            piece = memory[offset : offset + PIECE]
            self._read(piece, start + offset)
            digest.update(piece)
        self._compare(block, digest.hexdigest())

    def _compare(self, block: int, found: str) -> None:
        if found != self._hashes[block]:
            begin, end = self._range(block)
            raise self.damage(
                f"block {block} (bytes {begin} to {end}) has hash {found} instead of {self._hashes[block]}"
            )
        self._verified.add(block)

    def _read(self, memory: memoryview, start: int) -> None:
        with self._errors():
            while memory:
                count = os.preadv(self._descriptor, [memory], start)
                if count == 0:
                    raise self.damage(f"it ends at byte {start}")
                memory, start = memory[count:], start + count

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DamagedCheckpointError(
                f"`{self.path}` must be readable, but is not: {error.strerror}"
            ) from error
