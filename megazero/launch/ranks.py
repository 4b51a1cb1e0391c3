"""The ranks of one host: starting them, reading their output, sending signals, and ending them together."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megazero.launch.child import Child
from megazero.launch.job import HostOptions, Process, share_cores
from megazero.launch.lines import LineCutter
from megazero.launch.processes import process_table, receivers, send, sweep

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LAST_OUTPUT = 1.0  # seconds for output to end after its process; a descendant may keep the pipe open
_CANNOT_START = 127

Show = Callable[[str, bool, bytes], Awaitable[None]]
"""Shows a line: the label of its process, whether it is from standard error, and the line."""
Ended = Callable[[str, int], Awaitable[None]]
"""Handles the end of a process: its label and its status, 128 + n for signal n."""


def status_of(returncode: int) -> int:
    """The exit status in the form of a shell: 128 + n for a process that signal n has ended."""
    return 128 - returncode if returncode < 0 else returncode


class Ranks:
    """The processes of a node.

    Args:
        mark: the mark in their environment, see `processes.marked`.
        show, ended: called with their lines, and when they end.
    """

    def __init__(self, mark: str, show: Show, ended: Ended) -> None:
        self.mark = mark
        self._show = show
        self._ended = ended
        self._running: dict[str, Child] = {}
        self._started: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self, processes: Sequence[Process], environment: Mapping[str, str], folder: str, options: HostOptions
    ) -> None:
        """Start the processes; a process that cannot be started counts as ended with status 127.

        Args:
            processes: the processes to start.
            environment: variables that all processes get, besides their own.
            folder: the working folder.
            options: options about cores and logs.

        Raises:
            LaunchError: there are fewer cores than processes.
        """
        cores, size = options.cores or physical_cores(), len(processes)
        bound = [share_cores(cores, size, process.local) if options.bind else None for process in processes]
        for process, own_cores in zip(processes, bound, strict=True):
            threads = {} if own_cores is None else {"OMP_NUM_THREADS": str(len(own_cores))}
            variables = {**environment, **threads, **process.environment}
            try:
                child = await Child.start(
                    *process.words,
                    cwd=folder,
                    env=variables,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,  # signals of a terminal reach the launcher alone
                    preexec_fn=_tied_to_this_process(own_cores),
                )
            except OSError as error:
                await self._show(process.label, True, str(error).encode())
                await self._ended(process.label, _CANNOT_START)
                continue
            self._running[process.label] = child
            self._started.append(child)
            log = _open_log(options, process.label)
            self._tasks.append(asyncio.create_task(self._attend(process.label, child, log)))

    async def _attend(self, label: str, child: Child, log: BinaryIO | None) -> None:
        async def listen(stream: asyncio.StreamReader, error: bool) -> None:
            cutter = LineCutter()
            try:
                while data := await stream.read(1 << 16):
                    if log is not None:
                        log.write(data)
                    for line in cutter.feed(data, time.monotonic()):
                        await self._show(label, error, line)
            finally:
                for line in cutter.finish():
                    await self._show(label, error, line)

        assert child.stdout is not None
        assert child.stderr is not None
        streams = [
            asyncio.create_task(listen(child.stdout, False)),
            asyncio.create_task(listen(child.stderr, True)),
        ]
        status = status_of(await child.ended())
        _, late = await asyncio.wait(streams, timeout=_LAST_OUTPUT)
        for task in late:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        if log is not None:
            log.close()
        del self._running[label]
        await self._ended(label, status)

    def signal(self, number: int) -> None:
        """Send a signal to the processes that handle it."""
        table = process_table()
        for child in list(self._running.values()):
            send(receivers(child.pid, number, table), number)

    def stopped(self) -> list[str]:
        """The labels of processes that a signal has stopped."""
        if not self._running:
            return []
        table = process_table()
        return [
            label
            for label, child in self._running.items()
            if child.pid in table and table[child.pid].state == "T"
        ]

    async def await_end(self, seconds: float | None = None) -> bool:
        """Wait until all processes have ended, at most `seconds`; return whether they have."""
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=seconds)
            return not left
        return True

    async def end(self, seconds: float) -> list[int]:
        """Send SIGTERM to all processes, and kill them and their descendants after `seconds`.

        Returns:
            The pids of processes that could not be killed.
        """
        if not self._tasks:
            return []
        self.signal(signal.SIGTERM)
        await self.await_end(seconds)
        return await self.kill()

    async def kill(self) -> list[int]:
        """Kill all processes and their descendants; return the pids of those that could not be killed."""
        for child in list(self._running.values()):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        left = await asyncio.to_thread(sweep, self.mark)
        await self.await_end(_LAST_OUTPUT + 1)
        return left

    async def close(self) -> None:
        """Close the pipes of all processes, which descendants may still hold open."""
        await asyncio.gather(*(child.close() for child in self._started))


def _tied_to_this_process(cores: Sequence[int] | None) -> Callable[[], None]:
    """The `preexec_fn` of a child: binds it to `cores`, and lets it die with this process."""
    libc, parent = ctypes.CDLL(None), os.getpid()
    has_prctl = hasattr(libc, "prctl")

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts background jobs with interrupts ignored
        if has_prctl:
            libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(_CANNOT_START)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return prepare


def _open_log(options: HostOptions, label: str) -> BinaryIO | None:
    if options.logs is None:
        return None
    folder = Path(options.logs)
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{options.stamp}_rank{label}.log").open("ab", buffering=0)


def usable_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores() -> tuple[int, ...]:
    """The first thread of each physical core that this process may use."""
    cores = []
    for core in usable_cores():
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        first = path.read_text().replace("-", ",").split(",")[0] if path.exists() else str(core)
        if int(first) == core or int(first) not in usable_cores():
            cores.append(core)
    return tuple(cores)


def threads_of_each(processes: int) -> int:
    """The default of OMP_NUM_THREADS: the usable cores divided by the processes of a host, at least 1."""
    return max(1, len(usable_cores()) // processes)
