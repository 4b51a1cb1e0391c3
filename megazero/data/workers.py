"""Worker processes that live on a pipe: how they are started, and how their errors reach the parent.

If a worker dies, its pipe closes and the parent notices; if the parent dies, its ends close and the workers
find out. Every worker has a pipe of its own, and no lock is shared.
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

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")
_STOPPING = frozenset({signal.SIGINT, signal.SIGTERM})


def can_fork() -> bool:
    """Whether this process can be forked safely: on Linux, while it has no other Python thread.

    The system libraries of macOS do not survive a fork, and a lock held by another thread is never released
    in the child.
    """
    return sys.platform == "linux" and threading.active_count() == 1


@contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the end of the block.

    Around the start of a worker, so that a signal neither reaches a child that still has the parent's
    handlers nor leaves a child that nobody has noted.
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
    live: Callable[..., None], *given: object, forked: bool, others: Iterable[Connection] = (), name: str = ""
) -> tuple[Connection, BaseProcess]:
    """Start a process that calls ``live(pipe, *given)``. Call it with `signals_held`.

    Args:
        live: a worker's whole life; ends when the other end of its pipe closes.
        given: pickled unless the process is forked.
        forked: whether to fork, which shares what is open and loaded, or to start afresh.
        others: the parent's ends of other workers' pipes, which a fork copies: as long as a worker held one,
            nobody would notice the parent's exit.
        name: of the process.

    Returns:
        The parent's end of the pipe, and the process.
    """
    context: ForkContext | SpawnContext
    context = multiprocessing.get_context("fork") if forked else multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    inherited = (*others, ours) if forked else ()
    arguments = (live, theirs, inherited, given)
    process = context.Process(target=_begin, args=arguments, name=name or None, daemon=True)
    process.start()
    theirs.close()
    return ours, process


def outcome(action: Callable[[_Given], _Result], argument: _Given) -> _Result | Exception:
    """Call the action; return its result, or its error, which the parent is to raise: see `or_raise`."""
    try:
        return action(argument)
    except (MegazeroError, OSError) as error:
        return error
    except Exception:
        return RuntimeError(f"a worker failed:\n{traceback.format_exc()}")


def or_raise(result: _Result | BaseException) -> _Result:
    """Return the result, or raise it if it is an error."""
    if isinstance(result, BaseException):
        raise result
    return result


def _begin(
    live: Callable[..., None],
    pipe: Connection,
    inherited: tuple[Connection, ...],
    given: tuple[object, ...],
) -> None:
    # Ctrl-C reaches every process of the terminal; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)  # which `signals_held` has left to this process
    for end in inherited:
        end.close()
    try:
        live(pipe, *given)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
