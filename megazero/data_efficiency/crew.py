"""Tasks on several processes, each result as soon as it is there.

A task and a result are small; the data lie in files. On Linux the workers are forked, so that they share
what is open; elsewhere, or where another thread makes that unsafe, they are started fresh and `work` is
pickled. If a worker dies, its pipe closes and the parent notices; if the parent dies, the workers end after
their task.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from megazero.errors import DataError, MegazeroError

_STOPPING = frozenset({signal.SIGINT, signal.SIGTERM})


def run_tasks(work: Callable[[object], object], tasks: Iterable[object], processes: int) -> Iterator[object]:
    """What `work` returns for each task, in the order in which they finish.

    processes: how many to use; with 1, all is done in this one. Raises what `work` raises, and DataError if a
    worker is killed. Leaving the iterator ends the workers.
    """
    waiting = list(tasks)
    if processes <= 1 or len(waiting) <= 1:
        yield from map(work, waiting)
        return
    workers: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(min(processes, len(waiting))):
            pipe, process = _start(work, tuple(workers))
            workers[pipe] = process
        waiting.reverse()
        for pipe in workers:
            pipe.send((waiting.pop(),))
        busy = set(workers)
        while busy:
            for pipe in wait(list(busy)):
                result = _receive(pipe, workers[pipe])
                if waiting:
                    pipe.send((waiting.pop(),))
                else:
                    busy.discard(pipe)
                yield result
    finally:
        for process in workers.values():
            process.terminate()
        for pipe, process in workers.items():
            process.join()
            pipe.close()


def can_fork() -> bool:
    """Whether this process can be forked safely: on Linux, while it has no other Python thread."""
    return sys.platform == "linux" and threading.active_count() == 1


def _start(work: Callable, others: tuple[Connection, ...]) -> tuple[Connection, BaseProcess]:
    forked = can_fork()
    context = multiprocessing.get_context("fork" if forked else "spawn")
    # A signal must neither reach a child that still has the parent's handlers nor leave one unrecorded.
    with _signals_held() if forked else nullcontext():
        ours, theirs = context.Pipe()
        # A fork copies the parent's ends; a worker that held one would keep the others from seeing it exit.
        inherited = (*others, ours) if forked else ()
        process = context.Process(target=_serve, args=(theirs, work, inherited), daemon=True)
        process.start()
        theirs.close()
    return ours, process


@contextmanager
def _signals_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, work: Callable, inherited: Sequence[Connection]) -> None:
    """A worker's life: does what comes through `pipe` until the other end closes."""
    # Ctrl-C reaches every process of the terminal; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if inherited:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    for end in inherited:
        end.close()
    try:
        while True:
            (task,) = pipe.recv()
            pipe.send(_outcome(work, task))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _outcome(work: Callable, task: object) -> tuple[bool, object]:
    """(whether it went well, the result or the error)."""
    try:
        return True, work(task)
    except (MegazeroError, OSError) as error:
        return False, error
    except Exception:
        return False, RuntimeError(f"a worker failed:\n{traceback.format_exc()}")


def _receive(pipe: Connection, process: BaseProcess) -> object:
    try:
        good, result = pipe.recv()
    except (EOFError, ConnectionResetError) as error:
        process.join(timeout=5)
        raise DataError(
            f"worker process {process.pid} must finish its work, but ended with status {process.exitcode}; "
            "start again, which continues where this stopped. If memory ran out, use fewer processes."
        ) from error
    if not good:
        raise result
    return result
