"""Rows of a table that are worked out one after another, each within a time of its own.

They run in a process beside this one, which is started anew when it is lost: when a row does not end in time,
ends its process, or leaves a device that refuses all further work, as CUDA's does after a fault in a kernel.
What happens to one row is a line of the results and no more than that.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

Line = dict[str, Any]
Work = Callable[[str], Line]

START_SECONDS = 300.0
"""The time that a process has to import what rows need, which takes minutes on a busy machine."""


def run_rows(
    work: Work, rows: Mapping[str, float], seconds: float, workers: int = 1
) -> Iterator[tuple[str, Line]]:
    """Work out rows, begun in their order; each line comes as soon as it is there.

    Args:
        work: makes the line of a row from its name; a function that another process can import, or a
            `functools.partial` of one.
        rows: the seconds that each row may take, by name.
        seconds: the time for all rows; those left after it are left out.
        workers: how many processes work at a time; one, if rows are to be timed.

    Yields:
        A row's name with its line. Instead of a line there may be ``{"failed": REASON}``, with the traceback
        as ``trace`` where there is one, or ``{"left_out": REASON}``.
    """
    ends = time.monotonic() + seconds
    idle: SimpleQueue[Worker] = SimpleQueue()

    def one(name: str, limit: float) -> Line:
        rest = ends - time.monotonic()
        if rest <= 0:
            return {"left_out": f"{seconds:g} s had passed"}
        worker = Worker(work) if idle.empty() else idle.get()
        line = worker.line(name, min(limit, rest))
        if worker.usable:
            idle.put(worker)
        else:
            worker.end()
        return line

    pool = ThreadPoolExecutor(workers)
    try:
        names = {pool.submit(one, name, limit): name for name, limit in rows.items()}
        for done in as_completed(names):
            yield names[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)
        while not idle.empty():
            idle.get().end()


class Worker:
    """A process that works out rows.

    Attributes:
        usable: whether it can take a further row.
    """

    def __init__(self, work: Work):
        spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._connection, there = spawn.Pipe()
        # No daemon, as these may have no children, and torch's compiler has some.
        self._process = spawn.Process(target=_serve, args=(there, work))
        self._process.start()
        there.close()  # so that the process's end is noticed here
        self.usable, self._ready = True, False

    def line(self, name: str, seconds: float) -> Line:
        """The line of a row; a process that is new is waited for besides."""
        try:
            if not self._ready:
                if not self._connection.poll(START_SECONDS):
                    return self._lost(f"no process was there within {START_SECONDS:g} s")
                self._connection.recv()
                self._ready = True
            self._connection.send(name)
            if not self._connection.poll(seconds):
                return self._lost(f"it did not end within {seconds:.3g} s")
            line, self.usable = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(10)
            return self._lost(f"its process ended with {self._process.exitcode}")
        return line

    def _lost(self, reason: str) -> Line:
        self.usable = False
        return {"failed": reason}

    def end(self) -> None:
        """End the process, by force if it does not end by itself."""
        self._connection.close()
        if self.usable:
            self._process.join(10)
        self._process.kill()
        self._process.join(10)


def _serve(connection: Connection, work: Work) -> None:
    connection.send("ready")
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        try:
            line = work(name)
        except Exception as error:  # any failure of a row is its result
            first = (str(error).splitlines() or [""])[0]
            line = {"failed": f"{type(error).__name__}: {first}", "trace": traceback.format_exc()}
        gc.collect()  # an engine is in cycles, and a GPU has room for one
        connection.send((line, _device_answers()))


def _device_answers() -> bool:
    """Whether this process's GPU still takes work; True if it has used none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return False
    return True
