"""Tasks on several processes, each result as soon as it is there.

A task and a result are small; the data lie in files. On Linux the workers are forked, so that they share
what is open; elsewhere, or where another thread makes that unsafe, they are started fresh and `work` is
pickled. If a worker dies, its pipe closes and the parent notices; if the parent dies, the workers end after
their task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from megazero.data.workers import can_fork, or_raise, result_or_error, signals_held, start_worker
from megazero.errors import DataError

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def run_tasks(work: Callable[[_Task], _Result], tasks: Iterable[_Task], processes: int) -> Iterator[_Result]:
    """Yield the result of `work` for each task, in the order in which they finish.

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
            with signals_held():
                pipe, process = start_worker(_serve, work, forked=can_fork(), others=workers)
                workers[pipe] = process
        waiting.reverse()
        for pipe in workers:
            pipe.send((waiting.pop(),))
        busy = set(workers)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                result: _Result = or_raise(_receive(ready, workers[ready]))
                if waiting:
                    ready.send((waiting.pop(),))
                else:
                    busy.discard(ready)
                yield result
    finally:
        for process in workers.values():
            process.kill()  # SIGTERM would wait until a stopped one goes on
        for pipe, process in workers.items():
            process.join()
            pipe.close()


def _serve(pipe: Connection, work: Callable[[Any], object]) -> None:
    """A worker's life: does what comes through `pipe` until the other end closes."""
    while True:
        (task,) = pipe.recv()
        pipe.send((result_or_error(work, task),))


def _receive(pipe: Connection, process: BaseProcess) -> Any:
    try:
        (result,) = pipe.recv()
    except (EOFError, ConnectionResetError) as error:
        process.join(timeout=5)
        raise DataError(
            f"worker process {process.pid} must finish its work, but ended with status {process.exitcode}; "
            "start again, which continues where this stopped. If memory ran out, use fewer processes."
        ) from error
    return result
