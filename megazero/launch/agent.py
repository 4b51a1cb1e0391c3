"""The agent of a host: starts and ends its ranks as the launcher asks, and ends them if the launcher is lost.

The launcher runs

    python -m megazero.launch.agent

over ssh and exchanges messages with it over its standard input and output. So nothing of a launch is on a
command line, where shells would need quotes and everybody could see it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from megazero.errors import LaunchError, MegazeroError, printable
from megazero.launch.channel import Channel, Message, beat, open_port, reader_of
from megazero.launch.job import MARK
from megazero.launch.lines import Outlet
from megazero.launch.orders import ASKS_TO_SAVE, SIGNALS, Orders, host_environment, orders_from
from megazero.launch.ranks import Ranks, Show

_LAUNCHER_LOST = 30.0  # seconds without a message after which a launcher counts as lost
_TRY = 3.0  # seconds for a connection, an answer or a command
_ONE_REQUEST = 10.0  # seconds within which a repeated request to save counts as the same one
_SETTLED = 0.5  # seconds until ranks have had a signal that a scheduler sent to every process


class Agent:
    """One node's part of one attempt.

    Args:
        channel: the connection to the launcher.
        mark: the mark of the node's processes.
        show: shows a line of a rank.
        orders: what to start; None if the launcher sends it. A node with its own orders was started by a
            scheduler or by hand, and gets signals directly.

    Attributes:
        again: whether the launcher will start the ranks again.
    """

    def __init__(self, channel: Channel, mark: str, show: Show, orders: Orders | None = None) -> None:
        self.ranks = Ranks(mark, show, self._ended)
        self._channel = channel
        self._show = show
        self.again = False
        self._alone = orders is not None
        self._orders = orders
        self._status = 0
        self._started = False
        self._signalled: int | None = None
        self._asked: dict[int, float] = {}
        self._listener: asyncio.Server | None = None
        self._later: list[asyncio.Task[None]] = []

    async def serve(self, **facts: object) -> int:
        """Send `facts` about this host, if there are any, then obey the launcher until it ends or is lost.

        Returns:
            The exit status: the launcher's, or that of the first rank here that failed.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.signal, number)
        beating = asyncio.create_task(self._beat())
        try:
            if facts:
                await self._channel.send("hello", **facts)
            return await self._obey()
        finally:
            beating.cancel()
            for task in self._later:
                task.cancel()
            await self.ranks.close()
            if self.again:  # otherwise the process ends now, and a late signal must not change its status
                for number in SIGNALS:
                    loop.remove_signal_handler(number)
            if self._orders is not None and self._orders.options.pid_file is not None:
                Path(self._orders.options.pid_file).unlink(missing_ok=True)

    async def _obey(self) -> int:
        while True:
            try:
                message = await asyncio.wait_for(self._channel.receive(), _LAUNCHER_LOST)
            except asyncio.TimeoutError:
                message = None
            if message is None:
                self._channel.abandon()
                if self._alone:
                    await self._show("", True, b"the connection to node 0 is lost; the ranks here are ended")
                status = self._status or 1  # taken before the ranks are ended here
                await self.ranks.end(self._orders.grace if self._orders is not None else 0.0)
                return status
            if message["kind"] == "stop":
                left = await self.ranks.end(message["grace"])
                await self._channel.send("done", left=left)
            elif message["kind"] == "bye":
                self.again = message["again"]
                if "why" in message:
                    await self._show("", True, printable(str(message["why"])).encode())
                return int(message["status"])
            elif message["kind"] == "signal":
                self.signal(message["number"])
            elif message["kind"] != "beat":
                await self._prepare(message)

    async def _prepare(self, message: Message) -> None:
        try:
            if message["kind"] == "listen":
                port = await self._listen(message["port"], message["word"])
                await self._channel.send("listening", port=port)
            elif message["kind"] == "reach":
                tries = (
                    can_reach(address, message["port"], message["word"]) for address in message["addresses"]
                )
                reached = await asyncio.gather(*tries)
                pairs = zip(message["addresses"], reached, strict=True)
                await self._channel.send("reached", addresses=[address for address, yes in pairs if yes])
            elif message["kind"] == "start":
                await self._start(self._orders or orders_from(message))
        except MegazeroError as error:
            await self._channel.send("refused", why=str(error))

    async def _listen(self, port: int, word: str) -> int:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(word.encode() + b"\n")
            with suppress(ConnectionError, asyncio.TimeoutError):
                # The client closes first, so that the port is free at once.
                await asyncio.wait_for(reader.read(1), _TRY)
            writer.close()

        try:
            self._listener = await asyncio.start_server(answer, sock=open_port(port))
        except OSError as error:
            raise LaunchError(
                f"port {port} must be free, but is taken ({error.strerror}); leave `--master-port` out"
            ) from error
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    async def _start(self, orders: Orders) -> None:
        if self._listener is not None:
            self._listener.close()
        self._orders = orders
        environment, notes = host_environment(os.environ, orders.slots)
        for note in notes:
            await self._channel.send("note", text=note)
        if orders.options.pid_file is not None:
            _replace_file(Path(orders.options.pid_file), str(os.getpid()))
        try:
            await self.ranks.start(orders.processes, environment, orders.folder, orders.options)
        except MegazeroError:
            await self.ranks.kill()
            raise
        self._started = True

    async def _ended(self, label: str, status: int) -> None:
        self._status = self._status or status
        await self._channel.send("ended", label=label, status=status)

    async def _beat(self) -> None:
        steady = asyncio.create_task(beat(self._channel))
        known: list[str] = []
        try:
            while True:
                await asyncio.sleep(1)
                stopped = await asyncio.to_thread(self.ranks.stopped)
                if stopped != known:
                    await self._channel.send("stopped", labels=stopped)
                known = stopped
        finally:
            steady.cancel()

    def signal(self, number: int) -> None:
        """Pass a signal on to the ranks; without ranks, exit.

        Ranks that a terminating signal does not end are killed after the grace, or when it is repeated. A
        repeated request to save is passed on once, and a node with its own orders passes it on a little
        later: ranks that have received it from elsewhere would die of a second one while they end.
        """
        if self._orders is None or not self._started:
            os._exit(128 + number)
        now = time.monotonic()
        if number in ASKS_TO_SAVE and now < self._asked.get(number, float("-inf")) + _ONE_REQUEST:
            return
        self._asked[number] = now
        if self._alone:
            self._later.append(asyncio.create_task(self._channel.send("signalled", number=number)))
        again = self._signalled == number and number not in ASKS_TO_SAVE
        self._signalled = number
        if again:
            self._later.append(asyncio.create_task(self._kill_later(0)))
            return
        # A scheduler may have sent the signal to every process itself, as SLURM does without cgroups.
        delay = _SETTLED if self._alone and number in ASKS_TO_SAVE else 0.0
        asyncio.get_running_loop().call_later(delay, self.ranks.signal, number)
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            seconds = self._orders.save_grace if number in ASKS_TO_SAVE else self._orders.grace
            self._later.append(asyncio.create_task(self._kill_later(seconds)))

    async def _kill_later(self, seconds: float) -> None:
        if not await self.ranks.await_end(seconds):
            await self.ranks.kill()


def _replace_file(path: Path, text: str) -> None:
    """Write a new file in a folder where others may write, and may have put a link in its place.

    Raises LaunchError if the file cannot be written.
    """
    try:
        path.unlink(missing_ok=True)  # removes a link itself, never its target
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise LaunchError(
            f"`--save-pid` must write {path}, but cannot ({error.strerror}); set TMPDIR to a folder of yours"
        ) from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


async def can_reach(address: str, port: int, word: str) -> bool:
    """Whether an agent answers at this address and port with the word of this launch."""

    async def call() -> bool:
        reader, writer = await asyncio.open_connection(address, port)
        answer = await reader.readline()
        writer.close()
        return answer.decode(errors="replace").strip() == word

    try:
        return await asyncio.wait_for(call(), _TRY)
    except (OSError, ValueError, asyncio.TimeoutError):  # such as a line without an end
        return False


def run_to_the_end(part: Coroutine[Any, Any, int]) -> int:
    """Run the main coroutine of a process that ends afterwards; return the exit status.

    A closing event loop restores the default signal handlers, so signals are ignored first: a late signal
    must not change the status.
    """

    async def whole() -> int:
        try:
            return await part
        finally:
            for number in SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    return asyncio.run(whole())


def facts_of_host() -> dict[str, object]:
    """The host's name, the id of its boot, and addresses at which others may reach it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    addresses = os.environ.get("SSH_CONNECTION", "").split()[2:3]  # the address that ssh has reached
    try:
        known = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=_TRY, check=True)
        addresses += known.stdout.split()
    except (OSError, subprocess.SubprocessError):
        addresses.append(socket.getfqdn())
    return {
        "host": socket.gethostname(),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "addresses": list(dict.fromkeys(addresses)),
    }


async def _main() -> None:
    outlet = Outlet(1)
    channel = Channel(reader_of(0), outlet.write, outlet.abandon)

    def show(label: str, error: bool, line: bytes) -> Awaitable[None]:
        return channel.send("line", label=label, error=error, text=line.decode("utf-8", "surrogateescape"))

    status = await Agent(channel, os.environ.get(MARK, ""), show).serve(**facts_of_host())
    await outlet.flush()
    os._exit(status)  # the threads that read and write may never end


if __name__ == "__main__":
    asyncio.run(_main())
