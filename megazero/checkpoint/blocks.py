"""Files with a hash for each block, made while writing and compared while reading.

With one hash per file, a rank that needs a few rows would have to read the whole file to check them.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xxhash import xxh3_64

from megazero.checkpoint.remote.mirror import local_file
from megazero.errors import DamagedCheckpointError
from megazero.mpu.threads import helper_pool

BLOCK: Final = 4 << 20
# Bytes are hashed in pieces of this size as soon as they are read, while a cache may still have them.
_PIECE = 512 << 10
# Hashing takes half as long as reading from the page cache. Blocks are independent, so threads hide it.
_THREADS = 3


@dataclass(frozen=True)
class FileRecord:
    """Size and hashes of a file.

    Attributes:
        size: bytes.
        blocks: the xxh3_64 of each block, in hex; empty for a file that was not hashed.
    """

    size: int
    blocks: tuple[str, ...]


class BlockHasher:
    """Hashes bytes that arrive in order, block by block."""

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
        """Return size and hashes of everything so far."""
        last = (self._hash.hexdigest(),) if self._size % self._block_size else ()
        return FileRecord(self._size, (*self._done, *last))


def record_of(data: bytes) -> FileRecord:
    """Size and hashes of a file with this content."""
    hasher = BlockHasher()
    hasher.update(data)
    return hasher.record()


class BlockFile:
    """An open file whose bytes are checked as they are read; use it from one thread at a time.

    Args:
        path: a regular file, not a link.
        record: the expected size and hashes; None checks neither.
        verify: compare hashes too, not only the size.
        block_size: bytes per hash.

    Raises:
        DamagedCheckpointError: in all methods: the file is missing, cannot be read or is not as recorded.
    """

    def __init__(
        self, path: Path, record: FileRecord | None = None, *, verify: bool = True, block_size: int = BLOCK
    ):
        self.path = path
        self._block_size = block_size
        self._hashes = record.blocks if record is not None and verify else ()
        self._verified: set[int] = set()
        self._threads = helper_pool(_THREADS, "blocks")
        with self._errors():
            # Without O_NONBLOCK, opening a pipe would wait for its writer.
            self._descriptor = os.open(local_file(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def damage(self, what: str) -> DamagedCheckpointError:
        """The error to raise when `what` is wrong with this file."""
        return DamagedCheckpointError(
            f"`{self.path}` must be as it was written, but {what}; use another checkpoint"
        )

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill `memory`, a view of bytes, from byte `start` of the file on."""
        self.read_spans([(start, memory)])

    def read_spans(self, spans: Iterable[tuple[int, memoryview]]) -> None:
        """Fill several views of bytes, each from its start in the file on.

        A block is read and checked once for all views in it. Its bytes go straight into the views; those that
        no view wants pass through a small buffer, for the hash alone.
        """
        wanted: dict[int, list[tuple[int, memoryview]]] = defaultdict(list)
        for start, memory in sorted(spans, key=lambda span: span[0]):
            stop = start + len(memory)
            if start < 0 or stop > self.size:
                raise self.damage(f"bytes {start} to {stop} are not in its {self.size}")
            position = start
            while position < stop:
                block = position // self._block_size
                until = min(self._range(block)[1], stop)
                wanted[block].append((position, memory[position - start : until - start]))
                position = until
        self._read_blocks(wanted)

    def verify_all(self) -> None:
        """Read the whole file and compare all hashes, using little memory."""
        self._verified.clear()
        self._read_blocks({block: [] for block in range(len(self._hashes))})

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._threads.shutdown()
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _range(self, block: int) -> tuple[int, int]:
        begin = block * self._block_size
        return begin, min(begin + self._block_size, self.size)

    def _read_blocks(self, wanted: Mapping[int, Sequence[tuple[int, memoryview]]]) -> None:
        if len(wanted) == 1:
            self._read_block(*next(iter(wanted.items())))
            return
        reads = [self._threads.submit(self._read_block, block, spans) for block, spans in wanted.items()]
        wait(reads)  # once this raises, no thread may still be writing into the memory
        for read in reads:
            read.result()

    def _read_block(self, block: int, wanted: Sequence[tuple[int, memoryview]]) -> None:
        """Check a block and fill views from it; `wanted` is sorted by the start in the file."""
        if not self._hashes or block in self._verified:
            for start, memory in wanted:
                self._read(memory, start)
            return
        begin, end = self._range(block)
        digest, position, again = xxh3_64(), begin, []
        for start, memory in wanted:
            if start < position:  # overlaps the previous view: read again below, as it is hashed already
                again.append((start, memory))
                continue
            self._pass_over(position, start, digest)
            for offset in range(0, len(memory), _PIECE):
                piece = memory[offset : offset + _PIECE]
                self._read(piece, start + offset)
                digest.update(piece)
            position = start + len(memory)
        self._pass_over(position, end, digest)
        if (actual := digest.hexdigest()) != self._hashes[block]:
            raise self.damage(
                f"block {block} (bytes {begin} to {end}) has hash {actual} instead of {self._hashes[block]}"
            )
        self._verified.add(block)
        for start, memory in again:
            self._read(memory, start)

    def _pass_over(self, start: int, stop: int, digest: xxh3_64) -> None:
        """Hash bytes that no view wants."""
        buffer = memoryview(bytearray(min(_PIECE, stop - start)))
        for position in range(start, stop, _PIECE):
            piece = buffer[: min(_PIECE, stop - position)]
            self._read(piece, position)
            digest.update(piece)

    def _read(self, memory: memoryview, start: int) -> None:
        with self._errors():
            while memory:
                count = os.preadv(self._descriptor, [memory], start)
                if count == 0:
                    raise self.damage(f"byte {start} is no longer there")
                memory, start = memory[count:], start + count

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DamagedCheckpointError(
                f"`{self.path}` must be readable, but is not: {error.strerror}"
            ) from error
