"""A proxy of HTTP that spoils requests, by a seed: the same seed and requests give the same faults.

`with FaultyProxy(target, seed=1, faults=Faults.each(0.01)) as proxy` listens on `proxy.endpoint`. It forwards
each request to `target` ("http://127.0.0.1:8333") on a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, fields, replace
from urllib.parse import urlsplit

_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>reduce your request rate</Message></Error>"


@dataclass(frozen=True)
class Faults:
    """The probability of each fault of a request.

    error: 500 before it is done. slow_down: 503 before it is done. cut: the answer ends somewhere in the
    middle. delay: the answer comes late. half_open: no answer for `patience` seconds, then the connection
    ends. lost: the request is done, then the connection ends without an answer.
    """

    error: float = 0.0
    slow_down: float = 0.0
    cut: float = 0.0
    delay: float = 0.0
    half_open: float = 0.0
    lost: float = 0.0
    patience: float = 2.0
    seconds: float = 0.05  # of a delay

    @classmethod
    def each(cls, share: float) -> Faults:
        """Every kind with an equal part of `share`."""
        kinds = [name.name for name in fields(cls)][:6]
        return replace(cls(), **dict.fromkeys(kinds, share / len(kinds)))

    def draw(self, stream: random.Random) -> str:
        """A fault, or an empty string for none."""
        at = stream.random()
        for kind in ("error", "slow_down", "cut", "delay", "half_open", "lost"):
            at -= getattr(self, kind)
            if at < 0:
                return kind
        return ""


class FaultyProxy:
    """The proxy, on a thread with a loop of its own. happened: how often each fault struck; "" for none."""

    def __init__(self, target: str, seed: int, faults: Faults):
        self.target = urlsplit(target)
        self.faults = faults
        self.happened: Counter[str] = Counter()
        self._stream = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> FaultyProxy:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 24))
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _call(self, work: Awaitable[object]) -> object:
        async def run() -> object:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request and its answer on; False if the connection ends."""
        request = await _message(reader)
        fault = self.faults.draw(self._stream)
        self.happened[fault] += 1
        if fault == "error":
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
        elif fault == "slow_down":
            head = b"HTTP/1.1 503 Slow Down\r\nContent-Length: %d\r\n\r\n" % len(_SLOW_DOWN)
            writer.write(head + _SLOW_DOWN)
        elif fault == "half_open":
            await asyncio.sleep(self.faults.patience)
            return False
        else:
            return await self._forwarded(request, writer, fault)
        await writer.drain()
        return True

    async def _forwarded(self, request: bytes, writer: asyncio.StreamWriter, fault: str) -> bool:
        there, onward = await asyncio.open_connection(self.target.hostname, self.target.port, limit=1 << 24)
        try:
            onward.write(request)
            await onward.drain()
            answer = await _message(there, has_body=not request.startswith(b"HEAD "))
        finally:
            onward.close()
        if fault == "delay":
            await asyncio.sleep(self.faults.seconds)
        if fault == "lost":
            return False
        if fault == "cut":
            writer.write(answer[: self._stream.randrange(1, len(answer))])
            await writer.drain()
            return False
        writer.write(answer)
        await writer.drain()
        return b"connection: close" not in answer[:2000].lower()


async def _message(reader: asyncio.StreamReader, has_body: bool = True) -> bytes:
    """One request or answer: its head, and its body by Content-Length or chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not has_body or re.match(rb"HTTP/\S+ (204|304|1\d\d)", head):
        return head
    if re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head):
        body = b""
        while True:
            line = await reader.readuntil(b"\r\n")
            body += line + await reader.readexactly(int(line.split(b";")[0], 16) + 2)
            if int(line.split(b";")[0], 16) == 0:
                return head + body
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    if length is None and head.startswith(b"HTTP/"):
        return head + await reader.read()
    return head + await reader.readexactly(int(length[1]) if length else 0)
