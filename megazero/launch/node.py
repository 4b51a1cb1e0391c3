"""One node's part of a launch whose nodes are started by hand, pdsh, srun or mpirun.

    python -m megazero.launch.node JOB --node-rank 1 --master-addr HOST --master-port 29500

Node 0 waits at the address where rank 0 will listen, names the missing nodes every ten seconds, and keeps a
connection to each node, over which the failure of one ends all. Connections that do not prove that they know
the launch's secret are rejected.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import signal
import socket
import sys
from collections.abc import Awaitable, Sequence
from contextlib import suppress

from megazero.errors import ConfigError, exit_status
from megazero.launch.agent import Agent, run_to_the_end
from megazero.launch.channel import AgentLink
from megazero.launch.conductor import Conductor
from megazero.launch.job import Job, unpack
from megazero.launch.lines import Outlet, line_bytes, say
from megazero.launch.orders import orders_of
from megazero.launch.rendezvous import NodeRendezvous, connect, open_listener
from megazero.launch.secret import SECRET, made_secret, secret_file


async def _conduct(
    job: Job, secret: bytes, master: tuple[str, int], listener: socket.socket, attempt: int
) -> None:
    """The launcher's part on node 0: wait for all nodes, start them, and end them together."""
    rendezvous = NodeRendezvous(job, secret, master)

    async def show(link: AgentLink, label: str, error: bool, text: str) -> None:
        say(f"{link.name}: {text}")

    try:
        links = await rendezvous.gather(listener)
        for link in links:
            link.name = f"{link.name} (node {link.node})"
        orders = [orders_of(job, link.node, master, attempt) for link in links]
        conductor = Conductor(links, show, job.timeouts.silence)
        await conductor.conduct(orders, travel=False, last=attempt == job.restarts)
    finally:
        rendezvous.close()


async def _end_without_reader(agent: Agent) -> None:
    """End the ranks when nobody reads this node's output: pdsh has ended, which sends no signal."""
    poll = select.poll()
    poll.register(1, 0)
    while not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        await asyncio.sleep(0.5)
    agent.signal(signal.SIGHUP)


async def run_node(job: Job, node: int, master: tuple[str, int], *, prefix: bool) -> int:
    """Run this node's part of a launch; return the status of the launch.

    Args:
        job: the launch.
        node: this node's number.
        master: the address and port where node 0 waits, and where rank 0 will listen.
        prefix: whether lines are shown with host and rank.

    Raises:
        LaunchError: the nodes do not fit together, or the port is taken.
        ConfigError: the secret cannot be read or made.
    """
    out, error, name = Outlet(1), Outlet(2), socket.gethostname()
    facts = {"node": node, "nodes": len(job.hosts), "world": job.world_size, "host": name}

    def show(label: str, is_error: bool, line: bytes) -> Awaitable[None]:
        text = line.decode("utf-8", "surrogateescape")
        return (error if is_error else out).write(line_bytes(name, label, text, prefix))

    status, secret = 0, _made_secret() if node == 0 else b""
    for attempt in range(job.restarts + 1):
        conducting, place = None, master
        if node == 0:
            listener, here = open_listener(master)
            place = (here, master[1])
            conducting = asyncio.create_task(_conduct(job, secret, master, listener, attempt))
        connecting = asyncio.create_task(connect(place, facts))
        await asyncio.wait([connecting, *filter(None, [conducting])], return_when=asyncio.FIRST_COMPLETED)
        if conducting is not None and conducting.done():
            connecting.cancel()
            conducting.result()
        channel, close = await connecting
        agent = Agent(channel, job.mark(node), show, orders_of(job, node, master, attempt))
        watching = asyncio.create_task(_end_without_reader(agent))
        status = await agent.serve()
        watching.cancel()
        close()
        if conducting is not None:
            await conducting
        if not agent.again:
            break
        say(f"node {node} starts its ranks again ({attempt + 1} of {job.restarts})")
    await asyncio.gather(out.flush(), error.flush())
    return status


def _made_secret() -> bytes:
    secret, is_new = made_secret(os.environ)
    if is_new:
        say(
            f"the nodes of a launch know each other by {secret_file()}, which is made now; nodes that do not "
            f"share this folder need a copy of it, or {SECRET} set to its content"
        )
    return secret


def _node_of(text: str) -> int:
    """The number of a node, given as a number or as the name of a variable that holds it."""
    number = text if text.isdecimal() else os.environ.get(text, "")
    if not number.isdecimal():
        raise ConfigError(
            f"`--node-rank` must be a number, or the name of a variable that holds one, but is {text}"
        )
    return int(number)


def main(words: Sequence[str] | None = None) -> int:
    """Run a node of the launch on the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megazero.launch.node")
    parser.add_argument("job", help="the launch, as packed by `megazero.launch.job.pack`")
    parser.add_argument("--node-rank", required=True, help="the node's number, or the variable that holds it")
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--no-prefix", action="store_true")
    flags = parser.parse_args(words)
    job, status = unpack(flags.job), [0]

    def take_part() -> None:
        master = (flags.master_addr, flags.master_port)
        node = _node_of(flags.node_rank)
        status[0] = run_to_the_end(run_node(job, node, master, prefix=not flags.no_prefix))

    with suppress(KeyboardInterrupt):
        return exit_status(take_part) or status[0]
    return 130


if __name__ == "__main__":
    sys.exit(main())
