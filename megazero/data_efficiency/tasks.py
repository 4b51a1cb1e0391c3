"""Runs tasks on several processes.

Tasks and results are small; the data are in files. Workers are forked if that is safe, so that they share
open files; otherwise they are spawned and `work` is pickled. If a worker dies, its pipe closes and the parent
notices; if the parent dies, the workers exit after their task.
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

    processes: the number of workers; with 1, this process runs all tasks. Raises what `work` raises, and
    DataError if a worker is killed. Closing the iterator kills the workers.
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
            process.kill()  # SIGTERM would not end a stopped process
        for pipe, process in workers.items():
            process.join()
            pipe.close()


def _serve(pipe: Connection, work: Callable[[object], object]) -> None:
    """Run tasks from `pipe` until its other end closes."""
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
