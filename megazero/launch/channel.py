"""Messages between the launcher and the agent of a host: one JSON object in each line."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any

Message = dict[str, Any]
LINE_LIMIT = 1 << 20
BEAT = 1.0
"""Seconds between the messages by which each side shows that it is there."""
_BACKLOG = 4096
_LONGEST_NAME = 512


def _is_name(value: object) -> bool:
    """Whether it is a short text without what a terminal would obey."""
    return isinstance(value, str) and len(value) <= _LONGEST_NAME and value.isprintable()


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _within(least: int, most: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and value >= 0  # type: ignore[operator]  # a number


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_name, value))


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


_COUNT = _within(0, 1 << 24)
_PORT = _within(0, 65535)
_SIGNAL = _within(1, 64)
_STATUS = _within(0, 255)
_FIELDS = MappingProxyType(
    {
        "beat": (),
        "hello": (("host", _is_name), ("boot", _is_name), ("addresses", _are_names)),
        "listen": (("port", _PORT), ("word", _is_name)),
        "listening": (("port", _PORT),),
        "reach": (("addresses", _are_names), ("port", _PORT), ("word", _is_name)),
        "reached": (("addresses", _are_names),),
        "start": (),
        "line": (("label", _is_name), ("error", _is_truth), ("text", _is_text)),
        "note": (("text", _is_text),),
        "refused": (("why", _is_text),),
        "stopped": (("labels", _are_names),),
        "ended": (("label", _is_name), ("status", _STATUS)),
        "signal": (("number", _SIGNAL),),
        "signalled": (("number", _SIGNAL),),
        "stop": (("grace", _is_time),),
        "done": (("left", _are_numbers),),
        "bye": (("status", _STATUS), ("again", _is_truth)),
        # Between nodes that no ssh connects, before one trusts the other:
        "challenge": (("nonce", _is_name),),
        "node": (
            *(("node", _COUNT), ("nodes", _COUNT), ("world", _COUNT)),
            *(("host", _is_name), ("nonce", _is_name), ("proof", _is_name)),
        ),
        "welcome": (("proof", _is_name),),
        "unknown": (("why", _is_name),),
    }
)
"""The kinds of messages, and what each holds."""


def message_of(line: bytes) -> Message:
    """The message of a line; one that is none, such as a host's greeting, has the kind ``text``."""
    text = line.decode("utf-8", "surrogateescape")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict):
        kind = message.get("kind")
        fields = _FIELDS.get(kind) if isinstance(kind, str) else None
        if fields is not None and all(name in message and holds(message[name]) for name, holds in fields):
            return message
    return {"kind": "text", "text": text.rstrip()}


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
        """The next message; None at the end, and after a line that is too long."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):  # a line beyond the limit
            return None
        return message_of(line) if line else None


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
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def open_port_at(address: str, port: int) -> socket.socket | None:
    """A socket that listens at one address alone: that of this machine which `address` names here.

    Returns:
        None if it names none: it is another machine's, such as that of a gateway before this one, or unknown
        here, or a name that is this machine's alone, as Debian's /etc/hosts has it of a machine's own.

    Raises:
        OSError: the port is taken.
    """
    try:
        places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    for family, _, _, _, place in places:
        own = ip_address(str(place[0]).partition("%")[0])
        if own.is_loopback and address not in (place[0], "localhost"):
            continue
        try:
            return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return None


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
            try:
                loop.call_soon_threadsafe(*((reader.feed_data, data) if data else (reader.feed_eof,)))
            except RuntimeError:  # the loop has ended
                return

    threading.Thread(target=pump, daemon=True).start()
    return reader


async def beat(channel: Channel) -> None:
    """Show the other side for ever that this one is there."""
    while True:
        await channel.send("beat")
        await asyncio.sleep(BEAT)
