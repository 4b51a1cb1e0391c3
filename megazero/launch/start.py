"""The launcher: connects to all hosts, starts the ranks, and starts them again after a failure."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass

from megazero.launch.channel import AgentLink
from megazero.launch.commands import Reach
from megazero.launch.conductor import AttemptResult, Conductor
from megazero.launch.job import Job, with_hosts
from megazero.launch.lines import Outlet, printer, say
from megazero.launch.orders import SIGNALS, orders_of
from megazero.launch.ssh import (
    Connections,
    Unreachable,
    master_address,
    same_machine_notices,
    unreachable_error,
)

_NOBODY_READS = 128 + 13  # the status of a process that SIGPIPE has ended


@dataclass(frozen=True)
class LaunchSettings:
    """The user's settings of a launch that are not part of the job.

    Attributes:
        address, port: the master address and port; None to choose them automatically.
        try_address: whether every host first checks that it reaches the address.
        fan_out: the most connections that are made at once.
        prefix: whether lines are shown with host and rank.
        quiet: whether notices other than failures are suppressed.
    """

    address: str | None = None
    port: int | None = None
    try_address: bool = True
    fan_out: int = 32
    prefix: bool = True
    quiet: bool = False


async def run(job: Job, reach: Reach, settings: LaunchSettings) -> int:
    """Run a launch; return its exit status. Raises LaunchError if it cannot start."""
    return await _Launcher(job, reach, settings).run()  # its outlets need the running event loop


class _Launcher:
    """A launch with all its attempts."""

    def __init__(self, job: Job, reach: Reach, settings: LaunchSettings) -> None:
        self._job = job
        self._reach = reach
        self._settings = settings
        self._notice: Callable[[str], None] = (lambda text: None) if settings.quiet else say
        self._conductor: Conductor | None = None
        self._attempt: asyncio.Task[AttemptResult] | None = None
        self._signalled: int | None = None
        self._out, self._error = Outlet(1), Outlet(2)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._signal, number)
        reading = asyncio.create_task(self._watch_readers())
        try:
            return await self._run()
        finally:
            reading.cancel()
            await asyncio.gather(self._out.flush(), self._error.flush())

    async def _run(self) -> int:
        for attempt in range(self._job.restarts + 1):
            self._attempt = asyncio.create_task(self._once(attempt))
            try:
                result = await self._attempt
            except asyncio.CancelledError:
                return 128 + (self._signalled or signal.SIGINT)
            if self._out.broken and result.signalled == signal.SIGHUP:
                return _NOBODY_READS
            if not result.wants_restart:
                return result.status
            if attempt < self._job.restarts:
                self._notice(f"the ranks are started again ({attempt + 1} of {self._job.restarts})")
        return result.status

    async def _once(self, attempt: int) -> AttemptResult:
        connections = Connections(self._job, self._reach, self._settings.fan_out)
        try:
            links, lost = await connections.open(self._job.timeouts.rejoin if attempt else 0.0)
            job = self._on_answering_hosts(links, lost)
            for text in same_machine_notices(links):
                self._notice(text)
            wanted = self._settings.address, self._settings.port
            master = await master_address(job, links, wanted, self._settings.try_address)
            orders = [orders_of(job, node, master, attempt) for node in range(len(links))]
            show = printer(self._settings.prefix, self._out, self._error)
            hosts = f"{len(links)} host{'s' if len(links) > 1 else ''}"
            self._notice(f"{job.world_size} ranks on {hosts} meet at {master[0]}:{master[1]}")
            spare = len(links) - (job.least_hosts or len(links)) if job.script.rendezvous == "c10d" else 0
            self._conductor = Conductor(links, show, job.timeouts.silence, self._notice, spare)
            return await self._conductor.conduct(orders)
        finally:
            self._conductor = None
            await connections.abandon()

    def _on_answering_hosts(self, links: list[AgentLink], lost: list[Unreachable]) -> Job:
        """The job on the hosts that answered.

        Raises LaunchError if too few hosts answered; those that did not are named.
        """
        if not lost:
            return self._job
        if self._job.least_hosts is None or len(links) < self._job.least_hosts:
            raise unreachable_error(lost)
        job = with_hosts(self._job, [link.name for link in links])
        for host in lost:
            say(f"{host.name} does not answer and is left out: {host.why}")
        moved = [
            f"{host.name} has ranks {start}-{start + len(host.slots) - 1}"
            for host, start in zip(job.hosts, job.first_ranks(), strict=True)
        ]
        say(f"{job.world_size} ranks are left of {self._job.world_size}: {', '.join(moved)}")
        return job

    def _signal(self, number: int) -> None:
        self._signalled = number
        if self._conductor is not None:
            self._conductor.signal(number)
        elif self._attempt is not None:
            self._attempt.cancel()

    async def _watch_readers(self) -> None:
        """End the launch when nobody reads its output."""
        while not self._out.broken:
            await asyncio.sleep(0.5)
        self._signal(signal.SIGHUP)
