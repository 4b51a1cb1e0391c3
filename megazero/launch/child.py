"""A process that is read from, and has ended when it has ended.

asyncio's own waits (since Python 3.11) until nobody holds the process's output any more, and a descendant may
hold it for ever: `sleep 300 &` in a script that a host sources is enough.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import SubprocessStreamProtocol
from contextlib import suppress
from typing import Any

from megazero.launch.channel import LINE_LIMIT

_LOOK = 0.02
_GONE = 2.0  # seconds for the kernel to end a process that is killed


class Child(asyncio.subprocess.Process):
    """A running process; `close` is due at its end, as a pipe that outlives the loop complains."""

    @classmethod
    async def start(cls, *words: str, **options: Any) -> Child:
        """Start a process.

        Args:
            words: its command.
            options: as for `asyncio.create_subprocess_exec`.

        Raises:
            OSError: it cannot be started.
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
        """Wait until the process has ended, whoever still holds its output; returns its return code."""
        while self.returncode is None:
            await asyncio.sleep(_LOOK)
        return self.returncode

    async def end(self) -> None:
        """Kill the process if it still runs."""
        with suppress(ProcessLookupError):
            self.kill()
        with suppress(asyncio.TimeoutError):  # it hangs in the kernel
            await asyncio.wait_for(self.ended(), _GONE)

    async def close(self) -> None:
        """Kill the process if it still runs, and let go of its pipes."""
        await self.end()
        self._pipes.close()
