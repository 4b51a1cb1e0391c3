"""Kill workers that hang: workers that are stopped, or busy with one chunk for too long.

A killed worker closes its pipe, which the parent notices. But a worker that is stopped (SIGSTOP, a debugger),
or hangs in the file system or in a regular expression, would make the parent wait forever in a read or write.
So a thread looks at the workers periodically, and kills a worker that hangs, which closes its pipe.

Time is counted in looks, so that no time passes while the parent itself is stopped or the machine sleeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

_STOPPED = "Tt"  # states in /proc/PID/stat: stopped by a signal, or by a debugger


@dataclass(frozen=True)
class WorkerPatience:
    """Limits in seconds.

    Attributes:
        stopped: the longest time that a worker may be stopped.
        busy: the longest time for one chunk, counted while the parent waits for workers.
        look: the time between two looks.
    """

    stopped: float = 60.0
    busy: float = 1800.0
    look: float = 1.0


PATIENCE = WorkerPatience()


class Watched(Protocol):
    """A watched worker.

    Attributes:
        process: the worker's process.
        done: the number of results that it has returned.
        verdict: the watch sets this to the reason for killing it, a clause after "but".
    """

    process: BaseProcess
    done: int
    verdict: str | None

    def is_busy(self) -> bool:
        """Whether the worker has chunks whose results have not arrived."""


class WorkerWatch:
    """Looks at workers on a thread of its own, from `start` to `stop`.

    Args:
        workers: the workers, to which more may be added.
        patience: the limits.
        waits: returns whether the parent is waiting for a worker; else a worker may wait for the parent.
    """

    def __init__(self, workers: Sequence[Watched], patience: WorkerPatience, waits: Callable[[], bool]):
        self._workers = workers
        self._patience = patience
        self._waits = waits
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # one thread may stop the watch while another starts it

    def start(self) -> None:
        """Start the thread; a second call does nothing."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="worker watch", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for its end."""
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
    """Whether a process is stopped; False on systems without /proc, such as macOS."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in _STOPPED
