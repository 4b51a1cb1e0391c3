"""Messages between the launcher and the agent of a host: one JSON object in each line."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
LINE_LIMIT = 1 << 20
BEAT = 1.0
"""Seconds between the messages by which each side shows that it is there."""


class Channel:
    """A connection.

    Args:
        reader: where messages come from.
        write: writes bytes, and waits while the other side does not read.
        abandon: lets those who wait go on, as nobody reads any more.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        write: Callable[[bytes], Awaitable[None]],
        abandon: Callable[[], None],
    ) -> None:
        self.abandon = abandon
        self._reader = reader
        self._write = write

    async def send(self, kind: str, **facts: object) -> None:
        """Send a message; one that nobody receives any more is dropped, as reading says that they are
        gone.
        """
        try:
            await self._write(json.dumps({"kind": kind, **facts}).encode() + b"\n")
        except (ConnectionError, RuntimeError):
            return

    async def receive(self) -> Message | None:
        """The next message; None at the end. A line that is none, such as a greeting, has the kind
        ``text``.
        """
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):  # a line beyond the limit
            return None
        if not line:
            return None
        text = line.decode("utf-8", "surrogateescape")
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        return (
            message
            if isinstance(message, dict) and "kind" in message
            else {"kind": "text", "text": text.rstrip()}
        )


def stream_channel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
    """A channel over a socket, or a process's pipes."""
    lock = asyncio.Lock()

    async def write(data: bytes) -> None:
        async with lock:
            if writer.is_closing():  # asyncio would log each try
                return
            writer.write(data)
            await writer.drain()

    return Channel(reader, write, writer.close)


def open_port(port: int) -> socket.socket:
    """A socket that listens at a port on all addresses of this machine; 0 is one that is free.

    Raises:
        OSError: the port is taken.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", port), backlog=4096)


def reader_of(descriptor: int) -> asyncio.StreamReader:
    """A reader of a file descriptor, filled by a thread: sshd may use one socket for a process's input and
    output,
    which asyncio's transports take for a closed pipe when input comes."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT)

    def pump() -> None:
        data = b"\n"
        while data:
            try:
                data = os.read(descriptor, 1 << 16)
            except OSError:
                data = b""
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(*((reader.feed_data, data) if data else (reader.feed_eof,)))

    threading.Thread(target=pump, daemon=True).start()
    return reader


async def beat(channel: Channel) -> None:
    """Show the other side for ever that this one is there."""
    while True:
        await channel.send("beat")
        await asyncio.sleep(BEAT)
