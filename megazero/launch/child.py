"""A child process whose end does not wait for its output.

Since Python 3.11 asyncio's own `Process.wait` also waits until the pipes are closed, and a descendant may
hold them open for ever: `sleep 300 &` in a script that a host sources is enough.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import SubprocessStreamProtocol
from contextlib import suppress
from typing import Any

from megazero.launch.channel import LINE_LIMIT

_POLL = 0.02  # seconds
_KILLED = 2.0  # seconds for the kernel to end a killed process


class Child(asyncio.subprocess.Process):
    """A running process. Call `close` in the end: a pipe that outlives the event loop causes a warning."""

    @classmethod
    async def start(cls, *words: str, **options: Any) -> Child:
        """Start a process.

        Args:
            words: the command.
            options: as for `asyncio.create_subprocess_exec`.

        Raises:
            OSError: the process cannot be started.
        """
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(LINE_LIMIT, loop), *words, **options
        )
        return cls(transport, protocol, loop)

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        protocol: SubprocessStreamProtocol,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(transport, protocol, loop)
        self._pipes = transport

    async def ended(self) -> int:
        """Wait until the process has ended, even if its output is still open; return its return code."""
        while self.returncode is None:
            await asyncio.sleep(_POLL)
        return self.returncode

    async def end(self) -> None:
        """Kill the process if it still runs."""
        with suppress(ProcessLookupError):
            self.kill()
        with suppress(asyncio.TimeoutError):  # the process hangs in the kernel
            await asyncio.wait_for(self.ended(), _KILLED)

    async def close(self) -> None:
        """Kill the process if it still runs, and close its pipes."""
        await self.end()
        self._pipes.close()
