"""The conductor: follows the messages of all agents, and ends all ranks when one fails."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass

from megazero.errors import printable
from megazero.launch.channel import AgentLink, Message
from megazero.launch.lines import say
from megazero.launch.orders import ASKS_TO_SAVE, Orders

_NOTICE = 8.0  # seconds of silence after which a notice names the host
_MARGIN = 8.0  # seconds beyond the grace for an agent to report that its ranks have ended
_LAST_OUTPUT = 1.0  # seconds for a host's output to end after its agent
_SUSPENDED = 5.0  # a longer pause between two looks means that this process was suspended


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended.

    status: the exit status of the launch; reason: of a failure, empty otherwise; signalled: the signal that
    ended the attempt, if one did.
    """

    status: int
    reason: str = ""
    signalled: int | None = None

    @property
    def wants_restart(self) -> bool:
        """Whether the ranks failed, and nobody ended them."""
        return self.status != 0 and self.signalled is None


class Conductor:
    """Follows one attempt.

    Args:
        links: the connections, in the order of nodes.
        show: shows a line: the link, the label of its process, whether it is an error, the text.
        silence: seconds of silence after which a host counts as lost; 0 for never.
        notice: prints notices that are no failures.
        spare: the number of hosts other than the first that may be lost: the ranks of the others go on.
    """

    def __init__(
        self,
        links: Sequence[AgentLink],
        show: Callable[[AgentLink, str, bool, str], Awaitable[None]],
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
        self._result: AttemptResult | None = None
        self._signalled: int | None = None
        self._grace = 0.0
        self._sending: set[asyncio.Task[None]] = set()

    async def conduct(
        self, orders: Sequence[Orders], *, travel: bool = True, last: bool = True
    ) -> AttemptResult:
        """Start the processes of all nodes; return when they have ended.

        Args:
            orders: what each node starts.
            travel: whether to send the orders; otherwise the agents know them.
            last: whether a failure is final, without another attempt.
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
        result = self._result or AttemptResult(0)
        if result.status:
            await self._end_all(following)
        watching.cancel()
        if self._signalled is not None:
            status = result.status if self._signalled in ASKS_TO_SAVE else 128 + self._signalled
            result = AttemptResult(status, result.reason, self._signalled)
        again = result.wants_restart and not last
        byes = (link.channel.send("bye", status=result.status, again=again) for link in self._links)
        await asyncio.gather(*byes)
        await asyncio.gather(*(link.close() for link in self._links), return_exceptions=True)
        await asyncio.wait(following, timeout=_LAST_OUTPUT)  # a stray process may hold a host's output open
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        return result

    def signal(self, number: int) -> None:
        """Pass a signal on to all hosts."""
        self._signalled = number
        self._notice(f"{signal.Signals(number).name} is passed on to all ranks")
        for link in self._links:
            task = asyncio.create_task(link.channel.send("signal", number=number))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _follow(self, link: AgentLink) -> None:
        while True:
            link.state.waiting = time.monotonic()
            message = await link.channel.receive()
            link.state.waiting = None
            if message is None:
                if self._over.is_set() and (link.state.done or self._result is None):
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

    async def _take(self, link: AgentLink, message: Message) -> None:
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
            link.state.done = True
            if message["left"]:
                say(f"{link.name}: processes {message['left']} could not be ended")
        elif kind == "ended":
            self._note_end(link, message["label"], message["status"])

    def _note_end(self, link: AgentLink, label: str, status: int) -> None:
        link.state.running.discard(label)
        what = label if label == "torchrun" else f"rank {label}"
        if status == 128 + signal.SIGTERM and self._signalled == signal.SIGTERM:
            # Other ranks may still be saving, so they are not ended.
            self._result = self._result or AttemptResult(status, f"{what} on {link.name} ended{_how(status)}")
        elif status and not self._can_spare(link, f"{what} on {link.name} ended{_how(status)}"):
            self._fail(status, f"{what} on {link.name} ended{_how(status)}")
        if not any(link.state.running for link in self._links):
            self._over.set()

    def _can_spare(self, link: AgentLink, reason: str) -> bool:
        """Whether the other hosts go on without this one; if so, count it."""
        if self._spare == 0 or link.node == 0 or self._over.is_set() or self._signalled is not None:
            return False
        self._spare -= 1
        link.state.running.clear()
        say(f"{reason}; the others go on without it")
        return True

    def _fail(self, status: int, reason: str) -> None:
        if self._over.is_set():
            return
        self._result = AttemptResult(status, reason)
        if self._signalled is None:
            say(f"{reason}; all other ranks are ended")
        self._over.set()

    async def _watch(self) -> None:
        """Report silent hosts and stopped ranks, and fail after `silence` seconds."""
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
        """End all ranks on all hosts: by their agents, or over a new connection if an agent is lost."""
        alive = [link for link in self._links if not link.state.lost]
        await asyncio.gather(
            *(asyncio.wait_for(link.channel.send("stop", grace=self._grace), _MARGIN) for link in alive),
            return_exceptions=True,
        )
        deadline = time.monotonic() + self._grace + _MARGIN
        sweeping = asyncio.create_task(self._sweep([link for link in self._links if link.state.lost]))
        while time.monotonic() < deadline and not all(link.state.done or link.state.lost for link in alive):
            await asyncio.sleep(0.05)
        await sweeping
        await self._sweep([link for link in alive if not link.state.done])
        for task in following:
            task.cancel()

    async def _sweep(self, links: Sequence[AgentLink]) -> None:
        async def one(link: AgentLink) -> None:
            if link.sweep is None or not await link.sweep():
                say(
                    f"{link.name} could not be asked to end its processes; they end when its agent sees that "
                    "the connection is gone"
                )

        await asyncio.gather(*(one(link) for link in links))


def _troubles(link: AgentLink, now: float) -> list[tuple[AgentLink, str, float]]:
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
