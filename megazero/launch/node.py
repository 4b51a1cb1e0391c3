"""One node's part of a launch whose nodes are started by others: by hand, pdsh, srun or mpirun.

    python -m megazero.launch.node JOB --node-rank 1 --master-addr HOST --master-port 29500

Node 0 waits at the address where its first rank will listen, names the nodes that have not come every ten
seconds, and keeps a connection to each, over which the failure of one ends all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from megazero.errors import ConfigError, LaunchError, exit_status
from megazero.launch.agent import Agent, orders_of, run_to_the_end
from megazero.launch.channel import LINE_LIMIT, Channel, open_port, stream_channel
from megazero.launch.conductor import Conductor, Link, heartbeat, line_bytes, say
from megazero.launch.job import Job, bracketed, unpack
from megazero.launch.lines import Outlet

_NEWS = 10.0
_PAUSE = 0.3


def in_runs(numbers: Sequence[int]) -> str:
    """``1-3, 7`` for 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in runs)


class Meeting:
    """Node 0's wait for all nodes.

    Args:
        job: the launch.
        word: what nodes of the same launch say.
        master: the address and port to wait at.
    """

    def __init__(self, job: Job, word: str, master: tuple[str, int]) -> None:
        self._job = job
        self._word = word
        self._master = master
        self._links: dict[int, Link] = {}
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._beats: list[asyncio.Task[None]] = []
        self._all = asyncio.Event()
        self._problem: str | None = None

    async def gather(self) -> list[Link]:
        """Wait for all nodes; returns their connections in order.

        Raises:
            LaunchError: the port is taken, or a node takes part in another launch than this one.
        """
        try:
            door = open_port(self._master[1])
        except OSError as error:
            raise LaunchError(
                f"`--master-port` must be free on node 0, but {self._master[1]} is taken "
                f"({error.strerror}); name "
                "another one on all nodes"
            ) from error
        server = await asyncio.start_server(self._greet, sock=door, limit=LINE_LIMIT)
        try:
            while not await self._all_here():
                missing = [node for node in range(len(self._job.hosts)) if node not in self._links]
                count = f"{len(missing)} of {len(self._job.hosts)} nodes"
                say(f"node 0 waits at {_place(self._master)} for {count}: {in_runs(missing)}")
        finally:
            server.close()  # the first rank listens there next
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
        channel = stream_channel(reader, writer)
        hello = await channel.receive()
        if hello is None or hello["kind"] != "hello":
            writer.close()
            return
        node, size, name = int(hello["node"]), len(self._job.hosts), str(hello["host"])
        if hello["word"] != self._word:
            say(f"a node on {name} belongs to another launch and is left out")
            await channel.send("bye", status=1, again=False, why="node 0 belongs to another launch")
            writer.close()
            return

        async def close() -> None:
            writer.close()

        if (hello["nodes"], hello["world"]) != (size, self._job.world_size):
            self._problem = (
                f"all nodes must be told the same, but node {node} on {name} was told of {hello['nodes']} "
                "nodes and "
                f"{hello['world']} ranks, node 0 of {size} and {self._job.world_size}; correct one of them"
            )
        elif node in self._links:
            self._problem = (
                f"`--node-rank` must be another one on each node, but {self._links[node].name} and {name} "
                "both have "
                f"{node}; correct one of them"
            )
        else:
            link = Link(node, name, channel, close)
            self._links[node] = link
            self._beats.append(heartbeat(link))
            self._readers[node] = asyncio.create_task(self._await_loss(link))
        if self._problem is not None:
            await channel.send("bye", status=1, again=False, why=self._problem)
            writer.close()
        if self._problem is not None or len(self._links) == size:
            self._all.set()

    async def _await_loss(self, link: Link) -> None:
        while await link.channel.receive() is not None:
            continue
        say(f"node {link.node} on {link.name} has gone; it may come again")
        del self._links[link.node]

    def close(self) -> None:
        """Stop showing the nodes that node 0 is there."""
        for task in self._beats:
            task.cancel()


def _place(master: tuple[str, int]) -> str:
    return f"{bracketed(master[0])}:{master[1]}"


async def _connect(master: tuple[str, int], node: int) -> tuple[Channel, Callable[[], None]]:
    """A connection to node 0, as soon as it listens."""
    news = time.monotonic() + _NEWS
    host = master[0] if node else "localhost"
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, master[1], limit=LINE_LIMIT)
            return stream_channel(reader, writer), writer.close
        except OSError as error:
            if time.monotonic() > news:
                say(f"node {node} waits for node 0 at {_place(master)}: {error.strerror or error}")
                news = time.monotonic() + _NEWS
        await asyncio.sleep(_PAUSE)


async def _conduct(job: Job, word: str, master: tuple[str, int], attempt: int) -> None:
    """Node 0's other half: wait for all nodes, start them, and end them together."""
    meeting = Meeting(job, word, master)

    async def show(link: Link, label: str, error: bool, text: str) -> None:
        say(f"{link.name}: {text}")

    try:
        links = await meeting.gather()
        for link in links:
            link.name = f"{link.name} (node {link.node})"
        orders = [orders_of(job, link.node, master, attempt) for link in links]
        conductor = Conductor(links, show, job.limits.silence)
        await conductor.conduct(orders, travel=False, last=attempt == job.restarts)
    finally:
        meeting.close()


async def _end_without_reader(agent: Agent) -> None:
    """End the ranks when nobody reads this node's output: pdsh has gone, which sends no signal."""
    poll = select.poll()
    poll.register(1, 0)
    while not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        await asyncio.sleep(0.5)
    agent.signal(signal.SIGHUP)


async def run_node(job: Job, node: int, master: tuple[str, int], word: str, *, prefix: bool) -> int:
    """Take this node's part in a launch; returns the status of the launch.

    Args:
        job: the launch.
        node: this node's place among its hosts.
        master: where node 0 waits, and its first rank will listen.
        word: the same word on all nodes.
        prefix: whether lines are shown with the host and the rank.

    Raises:
        LaunchError: the nodes do not fit together, or the port is taken.
    """
    out, error, name = Outlet(1), Outlet(2), socket.gethostname()
    facts = {"node": node, "nodes": len(job.hosts), "world": job.world_size, "word": word, "host": name}

    def show(label: str, is_error: bool, line: bytes) -> Awaitable[None]:
        text = line.decode("utf-8", "surrogateescape")
        return (error if is_error else out).write(line_bytes(name, label, text, prefix))

    status = 0
    for attempt in range(job.restarts + 1):
        conducting = asyncio.create_task(_conduct(job, word, master, attempt)) if node == 0 else None
        connecting = asyncio.create_task(_connect(master, node))
        await asyncio.wait([connecting, *filter(None, [conducting])], return_when=asyncio.FIRST_COMPLETED)
        if conducting is not None and conducting.done():
            connecting.cancel()
            conducting.result()
        channel, close = await connecting
        agent = Agent(channel, job.mark(node), show, orders_of(job, node, master, attempt))
        watching = asyncio.create_task(_end_without_reader(agent))
        status = await agent.serve(**facts)
        watching.cancel()
        close()
        if conducting is not None:
            await conducting
        if not agent.again:
            break
        say(f"node {node} starts its ranks again ({attempt + 1} of {job.restarts})")
    await asyncio.gather(out.flush(), error.flush())
    return status


def _node_of(text: str) -> int:
    """A node's number, or that in the variable of this name."""
    number = text if text.isdecimal() else os.environ.get(text, "")
    if not number.isdecimal():
        raise ConfigError(
            f"`--node-rank` must be a number, or the name of a variable that holds one, but is {text}"
        )
    return int(number)


def main(words: Sequence[str] | None = None) -> int:
    """Be a node of the launch on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megazero.launch.node")
    parser.add_argument("job", help="what `megazero.launch.job.pack` made of the launch")
    parser.add_argument("--node-rank", required=True, help="the node's number, or the variable that holds it")
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--no-prefix", action="store_true")
    flags = parser.parse_args(words)
    job, status = unpack(flags.job), [0]

    def take_part() -> None:
        master = (flags.master_addr, flags.master_port)
        node = _node_of(flags.node_rank)
        status[0] = run_to_the_end(run_node(job, node, master, job.key, prefix=not flags.no_prefix))

    with suppress(KeyboardInterrupt):
        return exit_status(take_part) or status[0]
    return 130


if __name__ == "__main__":
    sys.exit(main())
