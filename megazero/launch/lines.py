"""Output as whole lines: cut from what ranks write, and written by one thread, so that none is torn or
lost.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from contextlib import suppress

LONGEST = 1 << 15
"""Bytes after which a line without an end is cut."""
_REDRAW = 1.0
_WAITING = 2000


class LineCutter:
    """Cuts what a rank writes into lines.

    A line that is drawn over and over with carriage returns, as a progress bar is, counts each second and
    when it ends.
    """

    def __init__(self) -> None:
        self._open = b""
        self._drawn = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that `data` completes, without their ends; `now` is a time in seconds."""
        *whole, self._open = (self._open + data).split(b"\n")
        lines = [self._last_drawn(line.removesuffix(b"\r")) for line in whole]
        drawn, turn, rest = self._open.rpartition(b"\r")
        if turn:
            shown = self._last_drawn(drawn)
            if rest and shown and now >= self._drawn + _REDRAW:
                lines.append(shown)
                self._drawn, shown = now, b""
            self._open = shown + b"\r" + rest
        while len(self._open) > LONGEST:
            lines.append(self._open[:LONGEST])
            self._open = self._open[LONGEST:]
        return lines

    def finish(self) -> list[bytes]:
        """The line that has no end yet, if there is one."""
        line, self._open = self._last_drawn(self._open.removesuffix(b"\r")), b""
        return [line] if line else []

    @staticmethod
    def _last_drawn(line: bytes) -> bytes:
        return line.rpartition(b"\r")[2]


class Outlet:
    """Writes to a file descriptor in order, from a thread; who writes waits while much is unwritten.

    Attributes:
        broken: whether nobody reads any more; what is written is then dropped.
    """

    def __init__(self, descriptor: int) -> None:
        self.broken = False
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(_WAITING)
        self._queue: queue.SimpleQueue[bytes | asyncio.Event | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()  # a blocked write must not keep us alive

    async def write(self, data: bytes) -> None:
        """Write `data` after all that was written before."""
        if not self.broken:
            await self._room.acquire()
            self._queue.put(data)

    async def flush(self, seconds: float = 5.0) -> None:
        """Wait until all is written, at most so long."""
        event = asyncio.Event()
        self._queue.put(event)
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except asyncio.TimeoutError:
            self.broken = True

    def abandon(self) -> None:
        """Drop what is not written yet, and let those who wait go on."""
        self.broken = True
        for _ in range(_WAITING):
            self._room.release()

    def close(self) -> None:
        """End the thread once all is written."""
        self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            done = item.set if isinstance(item, asyncio.Event) else self._room.release
            if isinstance(item, bytes):
                self._write_all(item)
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(done)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and not self.broken:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            self.broken = True
