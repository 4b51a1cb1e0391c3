"""Messages between the launcher and the agent of a host: one JSON object in each line."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any

Message = dict[str, Any]
LINE_LIMIT = 1 << 20
BEAT = 1.0
"""Seconds between two heartbeats."""
_BACKLOG = 4096
_LONGEST_NAME = 512


def _is_name(value: object) -> bool:
    """Whether `value` is a short text without control characters."""
    return isinstance(value, str) and len(value) <= _LONGEST_NAME and value.isprintable()


def _is_a(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


def _within(least: int, most: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and value >= 0  # type: ignore[operator]  # a number


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_name, value))


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


_TEXT, _BOOL = _is_a(str), _is_a(bool)
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
        "line": (("label", _is_name), ("error", _BOOL), ("text", _TEXT)),
        "note": (("text", _TEXT),),
        "refused": (("why", _TEXT),),
        "stopped": (("labels", _are_names),),
        "ended": (("label", _is_name), ("status", _STATUS)),
        "signal": (("number", _SIGNAL),),
        "signalled": (("number", _SIGNAL),),
        "stop": (("grace", _is_seconds),),
        "done": (("left", _are_numbers),),
        "bye": (("status", _STATUS), ("again", _BOOL)),
        # Between nodes that are not reached over ssh, before they trust each other:
        "challenge": (("nonce", _is_name),),
        "node": (
            *(("node", _COUNT), ("nodes", _COUNT), ("world", _COUNT)),
            *(("host", _is_name), ("nonce", _is_name), ("proof", _is_name)),
        ),
        "welcome": (("proof", _is_name),),
        "unknown": (("why", _is_name),),
    }
)
"""The kinds of messages, with the checks of their fields."""


def message_of(line: bytes) -> Message:
    """Parse a line; a line that is not a message, such as a host's greeting, becomes the kind "text"."""
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
    """A connection that carries messages.

    Args:
        reader: the stream of incoming messages.
        write: writes bytes, and waits while the other side does not read.
        abandon: releases waiting writers when nobody reads any more.
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
        """Send a message; drop it if the connection is lost, which `receive` reports."""
        try:
            await self._write(json.dumps({"kind": kind, **facts}).encode() + b"\n")
        except (ConnectionError, RuntimeError):
            return

    async def receive(self) -> Message | None:
        """The next message; None at the end of the connection, and after a line that is too long."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):  # ValueError: the line is longer than the limit
            return None
        return message_of(line) if line else None


def stream_channel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
    """A channel over a socket or the pipes of a process."""
    lock = asyncio.Lock()

    async def write(data: bytes) -> None:
        async with lock:
            if writer.is_closing():  # asyncio would log every write
                return
            writer.write(data)
            await writer.drain()

    return Channel(reader, write, writer.close)


def open_port(port: int) -> socket.socket:
    """Listen at a port on all addresses of this machine; port 0 takes a free one.

    Raises OSError if the port is taken.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def open_port_at(address: str, port: int) -> socket.socket | None:
    """Listen at a port on one address of this machine alone.

    Returns:
        None if `address` is no address of this machine that others reach: it belongs to another machine, such
        as a gateway, is unknown here, or resolves to loopback, as a host's own name does by Debian's
        /etc/hosts.

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
    """A stream reader of a file descriptor, filled by a thread.

    sshd may use one socket for a process's input and output; asyncio's own pipe transport takes it for closed
    when input comes.
    """
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
    """Send heartbeats without end."""
    while True:
        await channel.send("beat")
        await asyncio.sleep(BEAT)


@dataclass
class HostState:
    """The state of a host, as the conductor knows it.

    Attributes:
        running: labels of the processes that have not ended.
        waiting: since when the conductor waits for a message of the agent; None while it handles one.
        stopped: labels of stopped processes, and since when.
        done: whether the agent has ended all its processes as it was asked to.
        lost: whether the connection to the agent is lost.
    """

    running: set[str] = field(default_factory=set)
    waiting: float | None = None
    stopped: tuple[tuple[str, ...], float] = ((), 0.0)
    done: bool = False
    lost: bool = False


@dataclass
class AgentLink:
    """The conductor's side of the connection to an agent.

    Attributes:
        node, name: the number of the host in the job, and its name.
        close: ends the connection; returns the exit status of the process that made it, None if unknown.
        sweep: kills the launch's processes on the host over a new connection; None if that is impossible.
        facts: the agent's hello.
    """

    node: int
    name: str
    channel: Channel
    close: Callable[[], Awaitable[int | None]]
    sweep: Callable[[], Awaitable[bool]] | None = None
    facts: Message = field(default_factory=dict)
    state: HostState = field(default_factory=HostState)


def heartbeat(link: AgentLink) -> asyncio.Task[None]:
    """A task that sends heartbeats to the agent."""
    return asyncio.create_task(beat(link.channel))
