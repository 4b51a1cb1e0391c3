"""Notices workers that do not go on: stopped ones, and those that are busy with one chunk for too long.

A killed worker closes its pipe, which the parent sees. One that is stopped (SIGSTOP, a debugger), hangs in
the file system or in a regular expression that never ends leaves the parent waiting in some read or write. So
another thread looks at the workers now and then, and kills one that will not do: then its pipe closes too.

Time is counted in looks, so that it does not pass for a parent that is itself stopped, or a machine asleep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

_STOPPED = "Tt"  # letters of /proc: stopped by a signal, or by a debugger


@dataclass(frozen=True)
class WorkerPatience:
    """Seconds. stopped: that a worker may be stopped; busy: that it may take for a chunk, while the parent
    waits for workers; look: between two looks."""

    stopped: float = 60.0
    busy: float = 1800.0
    look: float = 1.0


PATIENCE = WorkerPatience()


class Watched(Protocol):
    """A worker that is watched. process: the worker's; done: how many results it gave; verdict: set to why it
    was killed, a clause after "but"."""

    process: BaseProcess
    done: int
    verdict: str | None

    def is_busy(self) -> bool:
        """Whether it holds chunks whose result is not here."""


class WorkerWatch:
    """Looks at workers on a thread of its own, from `start` to `stop`.

    waits: whether the parent is waiting for a worker right now; a result that the parent has no time for is
    not the worker's fault.
    """

    def __init__(self, workers: Sequence[Watched], patience: WorkerPatience, waits: Callable[[], bool]):
        self._workers = workers
        self._patience = patience
        self._waits = waits
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # one thread may stop the watch while another starts it

    def start(self) -> None:
        """Begin to look; a second call does nothing."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="worker watch", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop looking; return when the thread has ended."""
        self._over.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _look(self) -> None:
        patience, count = self._patience, len(self._workers)
        stopped, busy, done = [0.0] * count, [0.0] * count, [0] * count
        while not self._over.wait(patience.look):
            waits = self._waits()
            for k, worker in enumerate(self._workers):
                stopped[k] = stopped[k] + patience.look if _is_stopped(worker.process) else 0.0
                if worker.done != done[k] or not worker.is_busy():
                    busy[k], done[k] = 0.0, worker.done
                elif waits:
                    busy[k] += patience.look
                if stopped[k] > patience.stopped:
                    _end(worker, f"was stopped for {patience.stopped:g} s")
                elif busy[k] > patience.busy:
                    _end(worker, f"was not done after {patience.busy / 60:g} minutes (`--worker-timeout`)")


def _end(worker: Watched, why: str) -> None:
    if worker.verdict is None and worker.process.is_alive():
        worker.verdict = why
        worker.process.kill()


def _is_stopped(process: BaseProcess) -> bool:
    """Whether the system says that a process is stopped; False where it says nothing, as on macOS."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in _STOPPED
