"""`DiskTier`: files, read ahead and written behind while other state is worked on."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megazero.errors import OffloadError
from megazero.mpu.slab import Slab
from megazero.mpu.threads import helper_pool
from megazero.zero.store.tier import Tier, TierSlot, Traffic

PAGE = 4096
"""Bytes to whose multiples unbuffered reads and writes must keep, in memory and in the file."""

_Result = TypeVar("_Result")
_WRITES = 4  # slots that may be written at a time, however few are worked on
_NO_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class DiskSettings:
    """How a disk is read and written.

    Attributes:
        block: bytes of one request; a multiple of `PAGE`.
        depth: requests under way at a time.
        direct: bypass the system's page cache where the file system can (O_DIRECT).
    """

    block: int = 8 << 20
    depth: int = 4
    direct: bool = True


class DiskTier(Tier):
    """Keeps tensors in a file without a name, so that nothing is left of it however the process ends.

    Content is worked on in buffers, which are used again: one for each slot that is fetched or read ahead,
    and as many, or four, for those still being written. The file system sets the room aside when a slot is
    made, so a disk that is too small is found before the first step.

    Args:
        folder: a folder on the disk.
        settings: how it is read and written.
        slab: makes the buffers; by default, no device copies from and to them by itself.

    Raises:
        OffloadError: no file can be made there.
    """

    name = "nvme"
    in_place = False

    def __init__(self, folder: Path, settings: DiskSettings = DiskSettings(), slab: Slab | None = None):
        self._slab = slab or Slab()
        self._file = _OpenFile(folder, settings)
        self._size = 0
        self._slots: list[TierSlot] = []
        self._idle: list[mmap.mmap] = []
        self._buffers: dict[TierSlot, mmap.mmap] = {}
        self._reading: dict[TierSlot, _Requests] = {}
        self._writing: dict[TierSlot, _Requests] = {}
        self._mapped: mmap.mmap | None = None
        self._read = self._written = 0
        self._waited = 0.0

    def make(self, numel: int, dtype: torch.dtype, lead: int = 0) -> TierSlot:
        slot = TierSlot(numel, dtype, lead, self._size)
        self._file.reserve(self._size, _room(slot))
        self._size += _room(slot)
        self._slots.append(slot)
        self._mapped = None  # it was of the shorter file
        return slot

    def prefetch(self, slot: TierSlot) -> None:
        if slot in self._reading:
            return
        self._settle(slot)
        self._unmap()
        buffer = self._take(slot)
        self._read += _room(slot)
        self._reading[slot] = self._file.start(os.preadv, slot.start, memoryview(buffer)[: _room(slot)])

    def ready(self, slot: TierSlot) -> bool:
        return slot in self._reading and self._reading[slot].done()

    def fetch(self, slot: TierSlot) -> Tensor:
        self.prefetch(slot)
        self._wait(self._reading.pop(slot))
        return self._view(slot)

    def blank(self, slot: TierSlot) -> Tensor:
        if slot in self._reading:  # read ahead for a visit that ended early
            return self.fetch(slot)
        self._settle(slot)
        self._take(slot)
        return self._view(slot)

    def put(self, slot: TierSlot, content: Tensor) -> None:
        self._written += _room(slot)
        part = memoryview(self._buffers[slot])[: _room(slot)]
        self._writing[slot] = self._file.start(os.pwritev, slot.start, part)

    def drop(self, slot: TierSlot, content: Tensor) -> None:
        self._give_back(slot)

    def at_rest(self, slot: TierSlot) -> Tensor:
        if slot in self._reading:  # content read ahead for nothing must not outlive changes made here
            self.drop(slot, self.fetch(slot))
        self._settle(slot)
        if self._mapped is None:
            self._mapped = self._file.mapped(self._size)
        return torch.frombuffer(
            self._mapped, dtype=slot.dtype, count=slot.numel, offset=slot.start + slot.lead
        )

    def traffic(self) -> Traffic:
        return Traffic(self._read, self._written, self._waited)

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory for buffers, in use or not."""
        return sum(map(len, (*self._idle, *self._buffers.values())))

    def settle(self) -> None:
        """Wait for all writes.

        Raises:
            OffloadError: one has failed.
        """
        for slot in list(self._writing):
            self._settle(slot)

    def _settle(self, slot: TierSlot) -> None:
        """Wait until the content that was put is written."""
        transfer = self._writing.pop(slot, None)
        if transfer is not None:
            self._wait(transfer)
            self._give_back(slot)

    def _wait(self, transfer: _Requests) -> None:
        began = time.perf_counter()
        transfer.wait()
        self._waited += time.perf_counter() - began

    def _take(self, slot: TierSlot) -> mmap.mmap:
        """A buffer for a slot: one that is idle and large enough, or a new one that replaces an idle one."""
        while len(self._writing) > max(_WRITES, len(self._buffers) - len(self._writing)):
            self._settle(next(iter(self._writing)))
        for other in [written for written, transfer in self._writing.items() if transfer.done()]:
            self._settle(other)
        size = _room(slot)
        fitting = [buffer for buffer in self._idle if len(buffer) >= size]
        if fitting or self._idle:
            chosen = min(fitting or self._idle, key=len)
            self._idle = [buffer for buffer in self._idle if buffer is not chosen]
        try:
            self._buffers[slot] = chosen if fitting else self._slab.pages(size)
        except OSError as error:
            raise OffloadError(
                f"the host must have room for a buffer of {size / 2**20:.0f} MiB, but: {error}; choose a "
                "smaller `bucket_size`"
            ) from error
        return self._buffers[slot]

    def _give_back(self, slot: TierSlot) -> None:
        self._idle.append(self._buffers.pop(slot))

    def _view(self, slot: TierSlot) -> Tensor:
        return torch.frombuffer(self._buffers[slot], dtype=slot.dtype, count=slot.numel, offset=slot.lead)

    def _unmap(self) -> None:
        """Let go of the pages of `at_rest`; the file has everything that was written to them."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)


def _room(slot: TierSlot) -> int:
    """Bytes of the file for a slot: whole pages."""
    return -(-(slot.lead + slot.nbytes) // PAGE) * PAGE


@dataclass(frozen=True)
class _Requests:
    """Requests under way."""

    requests: list[Future[None]]

    def done(self) -> bool:
        return all(request.done() for request in self.requests)

    def wait(self) -> None:
        """Wait for all, then raise the first error."""
        errors = [request.exception() for request in self.requests]
        for error in errors:
            if error is not None:
                raise error


class _OpenFile:
    """A file without a name, and the threads that read and write it."""

    def __init__(self, folder: Path, settings: DiskSettings):
        self._folder = folder
        self._settings = settings
        self._file = self._checked(partial(_open_nameless, folder), "be made in")
        self._direct = _reopened(self._file) if settings.direct else None
        self._threads = helper_pool(settings.depth, "offload")
        files = {file for file in (self._file, self._direct) if file is not None}
        weakref.finalize(self, _close, files)

    def reserve(self, start: int, size: int) -> None:
        """Set room aside, of zeros."""
        grow = partial(os.posix_fallocate, self._file, start, size)
        self._checked(grow, f"grow by {size / 2**20:.1f} MiB, after {start / 2**20:.1f} MiB, in")

    def mapped(self, size: int) -> mmap.mmap:
        """All of the file as memory, after all writes."""
        return self._checked(partial(mmap.mmap, self._file, size), "be mapped from")

    def start(self, call: Callable[..., int], start: int, whole: memoryview) -> _Requests:
        """Start to read or write a part of the file."""
        block, requests = self._settings.block, []
        for begin in range(0, len(whole), block):
            work = partial(self._move, call, start + begin, whole[begin : begin + block])
            requests.append(self._threads.submit(self._checked, work, "be read and written in"))
        return _Requests(requests)

    def _move(self, call: Callable[..., int], start: int, part: memoryview) -> None:
        file = self._file if self._direct is None else self._direct
        while part:
            try:
                done = call(file, [part], start)
            except OSError as error:
                if file == self._file or error.errno not in _NO_DIRECT:
                    raise
                file = self._direct = self._file  # the file system only takes buffered requests
                continue
            if done == 0:
                raise OSError(errno.EIO, "the file is shorter than what was written")
            part, start = part[done:], start + done

    def _checked(self, work: Callable[[], _Result], what: str) -> _Result:
        try:
            return work()
        except OSError as error:
            hint = "free some room there" if error.errno == errno.ENOSPC else "look after the disk"
            raise OffloadError(
                f"the file of offloaded state must {what} `{self._folder}`, but: {error.strerror}; {hint}, "
                "or name another folder"
            ) from error


def _close(files: set[int]) -> None:
    for file in files:
        os.close(file)


def _open_nameless(folder: Path) -> int:
    """A new file that has no name, open for reading and writing."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (*_NO_DIRECT, errno.EISDIR):
            raise
    file, path = tempfile.mkstemp(prefix=".megazero-offload-", dir=folder)
    os.unlink(path)
    return file


def _reopened(file: int) -> int | None:
    """The same file for unbuffered requests; None if the file system has none."""
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
