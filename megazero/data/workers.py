"""Worker processes that are driven through a pipe: starting them, and passing their errors to the parent.

If a worker dies, its pipe closes and the parent notices; if the parent dies, its ends of the pipes close and
the workers exit. Every worker has a pipe of its own, and no lock is shared.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, TypeVar

from megazero.errors import MegazeroError

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext, SpawnContext

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")
_STOPPING = frozenset({signal.SIGINT, signal.SIGTERM})


def can_fork() -> bool:
    """Whether this process can be forked safely: on Linux, while it has one Python thread.

    The system libraries of macOS do not survive a fork, and in the child nobody releases a lock that another
    thread held. Those of obstore, which Python does not count, run in no child.
    """
    return sys.platform == "linux" and threading.active_count() == 1 and "obstore" not in sys.modules


@contextmanager
def signals_held() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block, in which workers are started.

    Otherwise a signal could run the parent's handlers in a new child, or stop the parent before it has
    recorded the child.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(
    work: Callable[..., None], *args: object, forked: bool, others: Iterable[Connection] = (), name: str = ""
) -> tuple[Connection, BaseProcess]:
    """Start a process that calls ``work(pipe, *args)``, under `signals_held`.

    Args:
        work: the worker's main function; returns or raises EOFError when the other end of its pipe closes.
        args: pickled unless the process is forked.
        forked: whether to fork, which shares open files and loaded modules, or to spawn.
        others: the parent's ends of other workers' pipes, which the child of a fork must close: while a
            worker holds one, the other worker does not notice the parent's exit.
        name: the name of the process.

    Returns:
        The parent's end of the pipe, and the process.
    """
    context: ForkContext | SpawnContext
    context = multiprocessing.get_context("fork") if forked else multiprocessing.get_context("spawn")
    parent_end, worker_end = context.Pipe()
    inherited = (*others, parent_end) if forked else ()
    arguments = (work, worker_end, inherited, args)
    process = context.Process(target=_run, args=arguments, name=name or None, daemon=True)
    process.start()
    worker_end.close()
    return parent_end, process


def result_or_error(action: Callable[[_Argument], _Result], argument: _Argument) -> _Result | Exception:
    """Call `action`; return its result, or its error for the parent to raise by `or_raise`."""
    try:
        return action(argument)
    except (MegazeroError, OSError) as error:
        return error
    except Exception:
        return RuntimeError(f"a worker failed:\n{traceback.format_exc()}")


def or_raise(result: _Result | BaseException) -> _Result:
    """Return `result`, or raise it if it is an error."""
    if isinstance(result, BaseException):
        raise result
    return result


def _run(
    work: Callable[..., None], pipe: Connection, inherited: tuple[Connection, ...], args: tuple[object, ...]
) -> None:
    # Ctrl-C reaches every process of the terminal; only the parent reacts to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)  # the mask of `signals_held` was inherited
    for end in inherited:
        end.close()
    try:
        work(pipe, *args)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
