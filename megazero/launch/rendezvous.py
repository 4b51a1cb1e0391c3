"""The rendezvous of nodes that are not reached over ssh: node 0 waits, and admits nodes that know the secret.

Each side proves to the other that it knows the secret, without sending it. Later messages are plain text.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from megazero.errors import LaunchError
from megazero.launch.channel import (
    AgentLink,
    Channel,
    Message,
    heartbeat,
    open_port,
    open_port_at,
    stream_channel,
)
from megazero.launch.job import Job, bracketed
from megazero.launch.lines import say
from megazero.launch.secret import SECRET, is_proof, known_secret, proof_of, secret_file

_NEWS = 10.0  # seconds between notices of a wait
_PAUSE = 0.3  # seconds between two tries to connect
_SHARED = 60.0  # seconds until a shared folder shows a file of node 0
_INTRODUCTION = 10.0  # seconds for a connection to prove that it belongs to the launch
_STRANGERS = 64  # connections without a proof, beyond one for each node, that may be open
_LINE = 1 << 16  # bytes of the longest message


def in_runs(numbers: Sequence[int]) -> str:
    """``1-3, 7`` for 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in runs)


class NodeRendezvous:
    """Node 0's wait for all nodes.

    Args:
        job: the launch.
        secret: the secret that the nodes of a launch share.
        master: the address and port where node 0 waits, for messages.
    """

    def __init__(self, job: Job, secret: bytes, master: tuple[str, int]) -> None:
        self._job = job
        self._secret = secret
        self._master = master
        self._links: dict[int, AgentLink] = {}
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._beats: list[asyncio.Task[None]] = []
        self._unknown: set[asyncio.StreamWriter] = set()
        self._strangers = 0
        self._all = asyncio.Event()
        self._problem: str | None = None

    async def gather(self, listener: socket.socket) -> list[AgentLink]:
        """Wait for all nodes at an open port; return their links in order.

        Raises LaunchError if a node that knows the secret was started for another launch.
        """
        server = await asyncio.start_server(self._greet, sock=listener, limit=_LINE)
        try:
            while not await self._all_here():
                missing = [node for node in range(len(self._job.hosts)) if node not in self._links]
                count = f"{len(missing)} of {len(self._job.hosts)} nodes"
                say(f"node 0 waits at {_place(self._master)} for {count}: {in_runs(missing)}")
        finally:
            server.close()  # rank 0 listens at the same port next
            for writer in self._unknown:
                writer.close()
        for task in self._readers.values():
            task.cancel()
        await asyncio.gather(*self._readers.values(), return_exceptions=True)
        if self._problem is not None:
            for link in self._links.values():
                await link.channel.send("bye", status=1, again=False, why=self._problem)
            raise LaunchError(self._problem)
        return [self._links[node] for node in range(len(self._job.hosts))]

    async def _all_here(self) -> bool:
        try:
            return await asyncio.wait_for(self._all.wait(), _NEWS)
        except asyncio.TimeoutError:
            return False

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Admit a connection if it proves that it knows the secret; close it otherwise."""
        if len(self._unknown) > _STRANGERS + len(self._job.hosts):
            writer.close()
            return
        self._unknown.add(writer)
        channel = stream_channel(reader, writer)
        try:
            hello = await asyncio.wait_for(self._introduced(channel), _INTRODUCTION)
        except asyncio.TimeoutError:
            hello = None
        finally:
            self._unknown.discard(writer)
        if hello is None:
            self._note_stranger(writer)
            writer.close()
            return

        async def close() -> None:
            writer.close()

        if not self._all.is_set():
            self._admit(AgentLink(hello["node"], hello["host"], channel, close), hello)
        if self._problem is not None or self._all.is_set():
            why = self._problem or "all nodes of the launch have come already"
            await channel.send("bye", status=1, again=False, why=why)
            writer.close()
        if self._problem is not None or len(self._links) == len(self._job.hosts):
            self._all.set()

    async def _introduced(self, channel: Channel) -> Message | None:
        """Receive a node's hello; None if it does not prove that it knows the secret."""
        challenge = secrets.token_hex(16)
        await channel.send("challenge", nonce=challenge)
        hello = await channel.receive()
        if hello is None or hello["kind"] != "node":
            return None
        if not is_proof(self._secret, hello["proof"], "node", challenge, *_claims(hello)):
            await channel.send("unknown", why="the secret of node 0 is another one")
            return None
        await channel.send("welcome", proof=proof_of(self._secret, "welcome", hello["nonce"], challenge))
        return hello

    def _note_stranger(self, writer: asyncio.StreamWriter) -> None:
        """Report a rejected connection: the first, the second, the fourth, the eighth, and so on."""
        self._strangers += 1
        if self._strangers & (self._strangers - 1) == 0:
            peer = writer.get_extra_info("peername") or ("an unknown address",)
            count = "1 connection" if self._strangers == 1 else f"{self._strangers} connections"
            say(f"{count} without the launch's secret left out, the last from {peer[0]}")

    def _admit(self, link: AgentLink, hello: Message) -> None:
        """Add a node, or record the problem that ends the rendezvous."""
        node, size, name = link.node, len(self._job.hosts), link.name
        if (hello["nodes"], hello["world"]) != (size, self._job.world_size) or node >= size:
            self._problem = (
                f"all nodes must be told the same, but node {node} on {name} was told of {hello['nodes']} "
                f"nodes and {hello['world']} ranks, node 0 of {size} and {self._job.world_size}; correct one "
                "of them"
            )
        elif node in self._links:
            self._problem = (
                f"`--node-rank` must be another one on each node, but {self._links[node].name} and {name} "
                f"both have {node}; correct one of them"
            )
        else:
            self._links[node] = link
            self._beats.append(heartbeat(link))
            self._readers[node] = asyncio.create_task(self._await_loss(link))

    async def _await_loss(self, link: AgentLink) -> None:
        while await link.channel.receive() is not None:
            continue
        say(f"node {link.node} on {link.name} has gone; it may come again")
        del self._links[link.node]

    def close(self) -> None:
        """Stop the heartbeats to the nodes."""
        for task in self._beats:
            task.cancel()


def _place(master: tuple[str, int]) -> str:
    return f"{bracketed(master[0])}:{master[1]}"


def _claims(hello: Message) -> list[object]:
    """The fields of a hello that its proof covers, in order."""
    return [hello[name] for name in ("nonce", "node", "nodes", "world", "host")]


def open_listener(master: tuple[str, int]) -> tuple[socket.socket, str]:
    """Open node 0's port at the master's address alone; return it and node 0's own address for it.

    Raises LaunchError if the port is taken.
    """
    try:
        listener = open_port_at(*master)
        if listener is not None:
            return listener, str(listener.getsockname()[0])
        say(f"{master[0]} is no address of this machine that others reach, so node 0 listens on all it has")
        return open_port(master[1]), "localhost"
    except OSError as error:
        raise LaunchError(
            f"`--master-port` must be free on node 0, but {master[1]} is taken ({error.strerror}); name "
            "another one on all nodes"
        ) from error


async def connect(place: tuple[str, int], facts: Message) -> tuple[Channel, Callable[[], None]]:
    """Connect to node 0, waiting until it listens; both sides prove that they know the secret.

    Raises:
        LaunchError: this node has no secret, or another one than node 0.
        ConfigError: the secret cannot be read.
    """
    begun, news, node = None, time.monotonic() + _NEWS, facts["node"]
    while True:
        why = ""
        try:
            reader, writer = await asyncio.open_connection(*place, limit=_LINE)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            begun = begun or time.monotonic()
            channel, secret = stream_channel(reader, writer), known_secret(os.environ)
            if secret is not None:
                with suppress(asyncio.TimeoutError):
                    if await asyncio.wait_for(_introduce(channel, secret, facts), _INTRODUCTION):
                        return channel, writer.close
                why = "it does not answer as node 0 of a launch does"
            elif time.monotonic() > begun + _SHARED:
                raise LaunchError(
                    f"node {node} must know the secret of node 0, but {secret_file()} is not there; copy it "
                    f"from node 0, for its owner alone, or set {SECRET} to the same value on all nodes"
                )
            else:  # a shared home folder may show a new file late
                why = f"{secret_file()} is not there yet"
            writer.close()
        if time.monotonic() > news:
            say(f"node {node} waits for node 0 at {_place(place)}: {why}")
            news = time.monotonic() + _NEWS
        await asyncio.sleep(_PAUSE)


async def _introduce(channel: Channel, secret: bytes, facts: Message) -> bool:
    """Prove to node 0 that this node knows the secret; return whether node 0 has proved the same.

    Raises LaunchError if node 0 has another secret.
    """
    challenge = await channel.receive()
    if challenge is None or challenge["kind"] != "challenge":
        return False
    hello = {**facts, "nonce": secrets.token_hex(16)}
    proof = proof_of(secret, "node", challenge["nonce"], *_claims(hello))
    await channel.send("node", **hello, proof=proof)
    answer = await channel.receive()
    if answer is not None and answer["kind"] == "unknown":
        raise LaunchError(
            f"node {facts['node']} must know the secret of node 0, but has another one; copy {secret_file()} "
            f"from node 0, or set {SECRET} to the same value on all nodes"
        )
    if answer is None or answer["kind"] != "welcome":
        return False
    return is_proof(secret, answer["proof"], "welcome", hello["nonce"], challenge["nonce"])
