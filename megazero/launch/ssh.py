"""Connections to the agents of hosts over ssh, and the choice of the master address."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megazero.errors import LaunchError
from megazero.launch.channel import AgentLink, Message, heartbeat, stream_channel
from megazero.launch.child import Child
from megazero.launch.commands import Reach, agent_command, sweep_command
from megazero.launch.hosts import LOCAL_NAMES
from megazero.launch.job import Job, bracketed
from megazero.launch.lines import say
from megazero.launch.ranks import status_of

_CLOSING = 5.0
_TIMEOUT = 15.0  # seconds for an agent to answer, or for a host to be swept
_PAUSE = 1.0
_LAST_LINES = 3
_LONGEST = 500  # characters of a line that is quoted in a reason


@dataclass(frozen=True)
class Unreachable:
    """A host that did not answer, and the reason."""

    name: str
    why: str


class Connections:
    """The connections of one attempt.

    Args:
        job: the launch.
        reach: how its hosts are reached.
        fan_out: the most connections that are made at once; sshd and firewalls refuse too many.
    """

    def __init__(self, job: Job, reach: Reach, fan_out: int) -> None:
        self._job = job
        self._reach = reach
        self._turns = asyncio.Semaphore(fan_out)
        self._children: list[Child] = []
        self._tasks: list[asyncio.Task[object]] = []

    async def open(self, patience: float = 0.0) -> tuple[list[AgentLink], list[Unreachable]]:
        """Connect to all hosts.

        Args:
            patience: seconds for which hosts that do not answer are retried.

        Returns:
            The links in the order of hosts, and the hosts that did not answer.
        """
        deadline = time.monotonic() + patience
        results = await asyncio.gather(*(self._try(node, deadline) for node in range(len(self._job.hosts))))
        links = [result for result in results if isinstance(result, AgentLink)]
        return links, [result for result in results if isinstance(result, Unreachable)]

    async def _try(self, node: int, deadline: float) -> AgentLink | Unreachable:
        tries = 0
        while True:
            async with self._turns:
                result = await self._connect(node)
            tries += 1
            if isinstance(result, AgentLink) or (tries > 1 and time.monotonic() > deadline):
                return result
            await asyncio.sleep(_PAUSE)

    async def _connect(self, node: int) -> AgentLink | Unreachable:
        name = self._job.hosts[node].name
        words = agent_command(self._reach, self._job, node)
        pipe = asyncio.subprocess.PIPE
        try:
            child = await Child.start(*words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            raise LaunchError(
                f"`{words[0]}` must be installed here, but cannot be run: {error.strerror}"
            ) from error
        self._children.append(child)
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        channel = stream_channel(child.stdout, child.stdin)
        errors: deque[str] = deque(maxlen=_LAST_LINES)

        def take(text: str) -> None:
            if link.facts:  # after the agent's hello, errors are news
                say(f"{name}: {text}")
            elif text.strip():
                errors.append(text[:_LONGEST])

        async def close() -> int | None:
            return await _close(child)

        async def sweep() -> bool:
            return await self._sweep(node)

        link = AgentLink(node, name, channel, close, sweep)
        collecting = asyncio.create_task(_collect(child.stderr, take))
        self._tasks.append(collecting)
        hello, text = await self._greeting(link, child)
        if hello is None:
            status = await _close(child)
            await asyncio.wait([collecting], timeout=_PAUSE)
            last = [*text, *errors][-_LAST_LINES:]
            return Unreachable(name, " / ".join(last) or f"ended with status {status} before it answered")
        link.facts = hello
        self._tasks.append(heartbeat(link))
        return link

    async def _greeting(self, link: AgentLink, child: Child) -> tuple[Message | None, Sequence[str]]:
        """The agent's hello, None if it does not come, and the lines before it."""
        text: deque[str] = deque(maxlen=_LAST_LINES)

        async def listen() -> Message | None:
            while (message := await link.channel.receive()) is not None and message["kind"] != "hello":
                if said := str(message.get("text", message)).strip():
                    text.append(said[:_LONGEST])
            return message

        async def end() -> None:
            await child.ended()
            await asyncio.sleep(_PAUSE)  # for its last output; a stray process may hold the pipe open

        listening, ending = asyncio.create_task(listen()), asyncio.create_task(end())
        self._tasks += [listening, ending]
        patience = self._job.timeouts.connect
        done, _ = await asyncio.wait([listening, ending], timeout=patience, return_when="FIRST_COMPLETED")
        if listening in done:
            return listening.result(), text
        return None, text if done else [*text, f"did not answer within {patience:.0f} s"]

    async def _sweep(self, node: int) -> bool:
        words = sweep_command(self._reach, self._job, node)
        null = asyncio.subprocess.DEVNULL
        child = await Child.start(*words, stdin=null, stdout=null, stderr=null, start_new_session=True)
        self._children.append(child)
        try:
            return await asyncio.wait_for(child.ended(), _TIMEOUT) == 0
        except asyncio.TimeoutError:
            return False

    async def abandon(self) -> None:
        """Close all connections at once; an agent that notices ends its ranks and itself."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(child.close() for child in self._children))


async def _collect(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # the line is longer than the limit, and is dropped
            continue
        if not line:
            return
        take(line.decode(errors="replace").rstrip())


async def _close(child: Child) -> int | None:
    assert child.stdin is not None
    child.stdin.close()
    try:
        return status_of(await asyncio.wait_for(child.ended(), _CLOSING))
    except asyncio.TimeoutError:
        await child.end()
        return None if child.returncode is None else status_of(child.returncode)


async def master_address(
    job: Job, links: Sequence[AgentLink], wanted: tuple[str | None, int | None], try_it: bool
) -> tuple[str, int]:
    """Choose the master address and port: free on the first host, and reached from every other host.

    Args:
        job: the launch.
        links: the connections to its hosts.
        wanted: the user's address and port; None, or port 0, to choose automatically.
        try_it: whether all hosts try the addresses; otherwise the first address of the host is taken.

    Raises:
        LaunchError: the port is taken, or some hosts do not reach the address; all of them are listed.
    """
    first, others = links[0], links[1:]
    await first.channel.send("listen", port=wanted[1] or 0, word=job.key)
    answer = await _answer(first)
    if answer["kind"] == "refused":
        raise LaunchError(f"{first.name}: {answer['why']}")
    port = int(answer["port"])
    if not others:
        return wanted[0] or "127.0.0.1", port
    name = job.hosts[0].name
    names = [] if name in LOCAL_NAMES else [name]
    known = first.facts["addresses"]
    addresses = [wanted[0]] if wanted[0] else list(dict.fromkeys([*known[:1], *names, *known]))
    if not try_it:
        return addresses[0], port
    questions = (link.channel.send("reach", addresses=addresses, port=port, word=job.key) for link in others)
    await asyncio.gather(*questions)
    reached_by = [(await _answer(link))["addresses"] for link in others]
    for address in addresses:
        if all(address in reached for reached in reached_by):
            return address, port
    best = max(addresses, key=lambda address: sum(address in reached for reached in reached_by))
    failing = [link.name for link, reached in zip(others, reached_by, strict=True) if best not in reached]
    tried = ", ".join(f"{bracketed(address)}:{port}" for address in addresses)
    raise LaunchError(
        f"every host must reach {first.name}, but {', '.join(failing)} "
        f"{'does' if len(failing) == 1 else 'do'} not (tried {tried}); give an address of {first.name} that "
        "all reach as `--master-addr`, or open the port"
    )


async def _answer(link: AgentLink) -> Message:
    async def listen() -> Message | None:
        while (message := await link.channel.receive()) is not None:
            if message["kind"] in ("listening", "reached", "refused"):
                return message
        return None

    try:
        message = await asyncio.wait_for(listen(), _TIMEOUT)
    except asyncio.TimeoutError:
        message = None
    if message is None:
        raise LaunchError(
            f"{link.name} must say whether ranks can meet, but has gone or says nothing; try again"
        )
    return message


def same_machine_notices(links: Sequence[AgentLink]) -> list[str]:
    """A notice for each machine that has several names among the hosts, so that ranks share its devices."""
    machines: dict[tuple[str, str], list[str]] = {}
    for link in links:
        machines.setdefault((link.facts["host"], link.facts["boot"]), []).append(link.name)
    return [
        f"{' and '.join(names)} are one machine ({host}); ranks with the same slot there share a device"
        for (host, _), names in machines.items()
        if len(names) > 1
    ]


def unreachable_error(hosts: Sequence[Unreachable]) -> LaunchError:
    """The error that names all hosts that did not answer."""
    lines = "".join(f"\n  {host.name}: {host.why}" for host in hosts)
    return LaunchError(
        f"every host must answer, but {len(hosts)} {'does' if len(hosts) == 1 else 'do'} not:{lines}"
    )
