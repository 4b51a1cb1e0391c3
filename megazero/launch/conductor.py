"""The conductor: follows what the agents of all hosts say, and ends all ranks when one fails."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field

from megazero.errors import printable
from megazero.launch.agent import ASKS_TO_SAVE, Orders
from megazero.launch.channel import Channel, Message, beat
from megazero.launch.lines import Outlet

_NOTICE = 8.0  # seconds of silence until a host is named; it is given up later
_MARGIN = 8.0  # seconds beyond the grace for an agent to say that its ranks have ended
_LAST_WORDS = 1.0  # seconds for a host's output to end after its agent
_SUSPENDED = 5.0  # a longer pause between two looks is this process's own


@dataclass
class HostState:
    """How a host is, as far as the conductor knows.

    Attributes:
        running: labels of the processes that have not ended.
        waiting: since when the agent has been silent; None while this side does not listen.
        stopped: labels of stopped processes, and since when.
        content: whether the agent has ended all its processes as it was asked to.
        lost: whether the agent is not to be reached any more.
    """

    running: set[str] = field(default_factory=set)
    waiting: float | None = None
    stopped: tuple[tuple[str, ...], float] = ((), 0.0)
    content: bool = False
    lost: bool = False


@dataclass
class Link:
    """The conductor's side of the connection to an agent.

    Attributes:
        node, name: the place of the host in the job, and its name.
        close: ends the connection; returns the exit status of what made it, None if that is not known.
        sweep: kills what is left on the host, by a connection of its own; None if it can not be.
        facts: what the agent has said of its host.
    """

    node: int
    name: str
    channel: Channel
    close: Callable[[], Awaitable[int | None]]
    sweep: Callable[[], Awaitable[bool]] | None = None
    facts: Message = field(default_factory=dict)
    state: HostState = field(default_factory=HostState)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: the status for the launch, why (empty if all went well), and the signal if one
    ended it.
    """

    status: int
    reason: str = ""
    signalled: int | None = None

    @property
    def wants_restart(self) -> bool:
        """Whether the ranks failed, and nobody ended them."""
        return self.status != 0 and self.signalled is None


def say(text: str) -> None:
    """Print a notice of the launcher."""
    print(f"megazero launch: {printable(text)}", file=sys.stderr, flush=True)


class Conductor:
    """Follows one attempt.

    Args:
        links: the connections, in the order of nodes.
        show: shows a line: the link, the label of its process, whether it is an error, the text.
        silence: seconds of silence until a host is lost; 0 for ever.
        notice: prints what is no failure.
        spare: how many hosts but the first may be lost, as what runs on the others goes on without them.
    """

    def __init__(
        self,
        links: Sequence[Link],
        show: Callable[[Link, str, bool, str], Awaitable[None]],
        silence: float,
        notice: Callable[[str], None] = say,
        spare: int = 0,
    ) -> None:
        self._links = links
        self._show = show
        self._silence = silence
        self._notice = notice
        self._spare = spare
        self._over = asyncio.Event()
        self._outcome: Outcome | None = None
        self._signalled: int | None = None
        self._grace = 0.0
        self._sending: set[asyncio.Task[None]] = set()

    async def conduct(self, orders: Sequence[Orders], *, travel: bool = True, last: bool = True) -> Outcome:
        """Start what each node is to start, and return when nothing of it runs any more.

        Args:
            orders: what each node starts.
            travel: whether the agents get their orders from here; else they know them.
            last: whether no other attempt follows a failure.
        """
        for link, own in zip(self._links, orders, strict=True):
            link.state.running = {process.label for process in own.processes}
            self._grace = own.grace
        pairs = zip(self._links, orders, strict=True)
        await asyncio.gather(
            *(link.channel.send("start", **(asdict(own) if travel else {})) for link, own in pairs)
        )
        following = [asyncio.create_task(self._follow(link)) for link in self._links]
        watching = asyncio.create_task(self._watch())
        await self._over.wait()
        outcome = self._outcome or Outcome(0)
        if outcome.status:
            await self._end_all(following)
        watching.cancel()
        if self._signalled is not None:
            status = outcome.status if self._signalled in ASKS_TO_SAVE else 128 + self._signalled
            outcome = Outcome(status, outcome.reason, self._signalled)
        again = outcome.wants_restart and not last
        byes = (link.channel.send("bye", status=outcome.status, again=again) for link in self._links)
        await asyncio.gather(*byes)
        await asyncio.gather(*(link.close() for link in self._links), return_exceptions=True)
        await asyncio.wait(following, timeout=_LAST_WORDS)  # a stray process may hold a host's output open
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        return outcome

    def signal(self, number: int) -> None:
        """Pass a signal on to all hosts."""
        self._signalled = number
        self._notice(f"{signal.Signals(number).name} is passed on to all ranks")
        for link in self._links:
            task = asyncio.create_task(link.channel.send("signal", number=number))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _follow(self, link: Link) -> None:
        while True:
            link.state.waiting = time.monotonic()
            message = await link.channel.receive()
            link.state.waiting = None
            if message is None:
                if self._over.is_set() and (link.state.content or self._outcome is None):
                    return
                link.state.lost = True
                status = await link.close()
                reason = f"the connection to {link.name} is lost{_how(status)}"
                if self._can_spare(link, reason):
                    await self._sweep([link])
                else:
                    self._fail(status or 1, reason)
                return
            await self._take(link, message)

    async def _take(self, link: Link, message: Message) -> None:
        kind = message["kind"]
        if kind == "line":
            await self._show(link, message["label"], message["error"], message["text"])
        elif kind == "text":
            await self._show(link, "", True, printable(message["text"]))
        elif kind == "note":
            self._notice(f"{link.name}: {message['text']}")
        elif kind == "refused":
            self._fail(2, f"{link.name}: {message['why']}")
        elif kind == "signalled":
            self._signalled = message["number"]
        elif kind == "stopped":
            link.state.stopped = (tuple(message["labels"]), time.monotonic())
        elif kind == "done":
            link.state.content = True
            if message["left"]:
                say(f"{link.name}: processes {message['left']} could not be ended")
        elif kind == "ended":
            self._note_end(link, message["label"], message["status"])

    def _note_end(self, link: Link, label: str, status: int) -> None:
        link.state.running.discard(label)
        what = label if label == "torchrun" else f"rank {label}"
        if status == 128 + signal.SIGTERM and self._signalled == signal.SIGTERM:
            # Others may be saving; the end is theirs.
            self._outcome = self._outcome or Outcome(status, f"{what} on {link.name} ended{_how(status)}")
        elif status and not self._can_spare(link, f"{what} on {link.name} ended{_how(status)}"):
            self._fail(status, f"{what} on {link.name} ended{_how(status)}")
        if not any(link.state.running for link in self._links):
            self._over.set()

    def _can_spare(self, link: Link, reason: str) -> bool:
        """Whether the others go on without a host."""
        if self._spare == 0 or link.node == 0 or self._over.is_set() or self._signalled is not None:
            return False
        self._spare -= 1
        link.state.running.clear()
        say(f"{reason}; the others go on without it")
        return True

    def _fail(self, status: int, reason: str) -> None:
        if self._over.is_set():
            return
        self._outcome = Outcome(status, reason)
        if self._signalled is None:
            say(f"{reason}; all other ranks are ended")
        self._over.set()

    async def _watch(self) -> None:
        """Name hosts that say nothing and ranks that are stopped, and give them up after a while."""
        named: set[tuple[str, str]] = set()
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            if now > last + _SUSPENDED:
                for link in self._links:
                    link.state.waiting = link.state.waiting and now
            last = now
            troubles = [trouble for link in self._links for trouble in _troubles(link, now)]
            for link, what, seconds in troubles:
                if self._silence and seconds > self._silence:
                    link.state.lost = link.state.lost or what == "has said nothing"
                    self._fail(1, f"{link.name} {what} for {seconds:.0f} s")
                elif seconds > min(_NOTICE, self._silence or _NOTICE) and (link.name, what) not in named:
                    named.add((link.name, what))
                    say(f"{link.name} {what} for {seconds:.0f} s")
            named &= {(link.name, what) for link, what, _ in troubles}

    async def _end_all(self, following: Sequence[asyncio.Task[None]]) -> None:
        """End all ranks on all hosts: by their agents, and where an agent is lost, by a connection of its
        own.
        """
        alive = [link for link in self._links if not link.state.lost]
        await asyncio.gather(
            *(asyncio.wait_for(link.channel.send("stop", grace=self._grace), _MARGIN) for link in alive),
            return_exceptions=True,
        )
        deadline = time.monotonic() + self._grace + _MARGIN
        sweeping = asyncio.create_task(self._sweep([link for link in self._links if link.state.lost]))
        while time.monotonic() < deadline and not all(
            link.state.content or link.state.lost for link in alive
        ):
            await asyncio.sleep(0.05)
        await sweeping
        await self._sweep([link for link in alive if not link.state.content])
        for task in following:
            task.cancel()

    async def _sweep(self, links: Sequence[Link]) -> None:
        async def one(link: Link) -> None:
            if link.sweep is None or not await link.sweep():
                say(
                    f"{link.name} could not be asked to end its processes; they end when its agent sees "
                    "that the "
                    "connection is gone"
                )

        await asyncio.gather(*(one(link) for link in links))


def _troubles(link: Link, now: float) -> list[tuple[Link, str, float]]:
    labels, since = link.state.stopped
    troubles = []
    if link.state.waiting is not None:
        troubles.append((link, "has said nothing", now - link.state.waiting))
    if labels:
        troubles.append((link, f"has had stopped ranks ({', '.join(labels)})", now - since))
    return troubles


def _how(status: int | None) -> str:
    if status is None:
        return ""
    if status > 128:
        try:
            return f" by {signal.Signals(status - 128).name} (status {status})"
        except ValueError:
            pass
    return f" with status {status}"


def printer(prefix: bool, out: Outlet, error: Outlet) -> Callable[[Link, str, bool, str], Awaitable[None]]:
    """A function that shows lines as ``HOST[RANK]: TEXT``, those of standard error there."""

    async def show(link: Link, label: str, is_error: bool, text: str) -> None:
        await (error if is_error else out).write(line_bytes(link.name, label, text, prefix))

    return show


def line_bytes(host: str, label: str, text: str, prefix: bool) -> bytes:
    """A line as it is shown. What ranks write is theirs, colours and all; host and label are made printable
    where they come in."""
    who = f"{host}[{label}]: " if label else f"{host}: "
    line = f"{who if prefix else ''}{text}\n"
    try:
        return line.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair, which no rank has written
        return line.encode("utf-8", "replace")


def heartbeat(link: Link) -> asyncio.Task[None]:
    """A task that shows the agent that the conductor is there."""
    return asyncio.create_task(beat(link.channel))
