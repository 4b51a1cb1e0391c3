"""Output as whole lines: split from the output of ranks, and written by one thread, so that none is torn."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

from megazero.errors import printable
from megazero.launch.channel import AgentLink

LONGEST = 1 << 15
"""Bytes after which a line without an end is split."""
_REDRAW = 1.0  # seconds between two shown states of a progress bar
_WAITING = 2000  # unwritten lines after which writers wait


class LineCutter:
    """Splits the output of a rank into lines.

    Of a line that is redrawn by carriage returns, such as a progress bar, one state per second and the last
    state become lines.
    """

    def __init__(self) -> None:
        self._open = b""
        self._drawn = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that `data` completes, without line ends; `now` is the time in seconds."""
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
        """The last line, if it has no line end."""
        line, self._open = self._last_drawn(self._open.removesuffix(b"\r")), b""
        return [line] if line else []

    @staticmethod
    def _last_drawn(line: bytes) -> bytes:
        return line.rpartition(b"\r")[2]


class Outlet:
    """Writes to a file descriptor in order, from a thread; writers wait while many lines are unwritten.

    Attributes:
        broken: whether nobody reads any more; further writes are then dropped.
    """

    def __init__(self, descriptor: int) -> None:
        self.broken = False
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(_WAITING)
        self._queue: queue.SimpleQueue[bytes | asyncio.Event | None] = queue.SimpleQueue()
        threading.Thread(
            target=self._work, daemon=True
        ).start()  # daemon: a blocked write must not keep the process alive

    async def write(self, data: bytes) -> None:
        """Write `data` after all earlier writes."""
        if not self.broken:
            await self._room.acquire()
            self._queue.put(data)

    async def flush(self, seconds: float = 5.0) -> None:
        """Wait until everything is written, at most `seconds`."""
        event = asyncio.Event()
        self._queue.put(event)
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except asyncio.TimeoutError:
            self.broken = True

    def abandon(self) -> None:
        """Drop what is not written yet, and release waiting writers."""
        self.broken = True
        for _ in range(_WAITING):
            self._room.release()

    def close(self) -> None:
        """End the thread when everything is written."""
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


def say(text: str) -> None:
    """Print a notice of the launcher."""
    print(f"megazero launch: {printable(text)}", file=sys.stderr, flush=True)


def printer(
    prefix: bool, out: Outlet, error: Outlet
) -> Callable[[AgentLink, str, bool, str], Awaitable[None]]:
    """A function that shows lines as ``HOST[RANK]: TEXT``, those of standard error on `error`."""

    async def show(link: AgentLink, label: str, is_error: bool, text: str) -> None:
        await (error if is_error else out).write(line_bytes(link.name, label, text, prefix))

    return show


def line_bytes(host: str, label: str, text: str, prefix: bool) -> bytes:
    """A line as it is shown. Control characters of ranks, such as colours, are kept.

    `channel` has checked that host and label are printable.
    """
    who = f"{host}[{label}]: " if label else f"{host}: "
    line = f"{who if prefix else ''}{text}\n"
    try:
        return line.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair, which no rank can have written
        return line.encode("utf-8", "replace")
