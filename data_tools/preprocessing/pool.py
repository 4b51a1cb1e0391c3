"""Runs chunks on several processes, with results in order.

Each chunk goes to the worker with the least to do, so that one on a busy core does not hold up the rest; the
parent remembers the order. Every worker has its own pipe and no lock is shared. On Linux the tokenizer is
loaded once and the workers are forked with it; they return their arrays in shared memory. If fork is
unavailable or unsafe (other threads exist), they are started fresh ("spawn"), load the tokenizer themselves
and send everything through their pipes. If a worker dies, its pipe closes and the parent notices; if the
parent dies, its ends close and the workers exit.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from data_tools.preprocessing.chunks import CHUNK_BYTES, Chunk
from data_tools.preprocessing.encode import ChunkEncoder, EncodedChunk, EncodeJob, EncoderFacts
from data_tools.preprocessing.slots import SharedSlots
from megazero.errors import DataError, MegazeroError

# The most chunks a worker has: one in work and one waiting, so that it never idles; and, counting those whose
# result waits for its turn, enough that it need not stop for one that is held up. This bounds memory.
_QUEUED, _AHEAD = 2, 8
_STOPPING = frozenset({signal.SIGINT, signal.SIGTERM})


class SoloCrew:
    """This process as the only worker."""

    def __init__(self, job: EncodeJob):
        self._encoder = ChunkEncoder(job)
        self.facts = self._encoder.facts

    def results(self, chunks: Iterable[Chunk]) -> Iterator[EncodedChunk]:
        """The encoded chunks in order."""
        return map(self._encoder, chunks)

    def __enter__(self) -> SoloCrew:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to end."""


@dataclass
class _Worker:
    """The parent's view of a worker. `working` counts chunks sent to it whose result is not yet here,
    `results` are those that are and wait for their turn."""

    name: str
    pipe: Connection
    slots: SharedSlots | None
    process: multiprocessing.process.BaseProcess | None = None
    working: int = 0
    results: deque[EncodedChunk | BaseException] = field(default_factory=deque)

    def has_room(self) -> bool:
        return self.working < _QUEUED and self.working + len(self.results) < _AHEAD

    def send(self, chunk: Chunk) -> None:
        try:
            self.pipe.send(chunk)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._death() from error
        self.working += 1

    def receive(self) -> Any:
        try:
            result = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._death() from error
        return result if self.slots is None else self.slots.unpack(result)

    def _death(self) -> DataError:
        self.process.join(timeout=5)
        code = self.process.exitcode
        how = (
            f"by signal {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"with status {code}"
        )
        return DataError(
            f"{self.name} (process {self.process.pid}) must finish its work, but ended {how}; nothing was "
            "written. If memory ran out, use fewer `--workers`."
        )


class Crew:
    """Several worker processes; a context manager that ends them. Raises what a worker raised, and DataError
    naming the worker if one is killed. `chunk_bytes` is the usual size of a chunk."""

    facts: EncoderFacts

    def __init__(self, job: EncodeJob, workers: int, chunk_bytes: int = CHUNK_BYTES):
        self._workers: list[_Worker] = []
        # Kept to the end: freeing it would copy the pages that the workers still share.
        self._encoder = ChunkEncoder(job) if can_fork() else None
        try:
            for number in range(workers):
                self._start(number, job, chunk_bytes)
            every = [_or_raise(worker.receive()) for worker in self._workers]
            self.facts = every[0]
        except BaseException:
            self.close()
            raise

    def _start(self, number: int, job: EncodeJob, chunk_bytes: int) -> None:
        forked = self._encoder is not None
        context = multiprocessing.get_context("fork" if forked else "spawn")
        # Room for one token per byte of the chunk; what needs more goes through the pipe.
        slots = SharedSlots(_AHEAD, chunk_bytes * self._encoder.dtype.itemsize) if forked else None
        # A signal must neither reach a child that still has the parent's handlers nor leave one unrecorded.
        with _signals_held() if forked else nullcontext():
            ours, theirs = context.Pipe()
            worker = _Worker(f"worker {number}", ours, slots)
            self._workers.append(worker)
            source = self._encoder if forked else job
            inherited = tuple(other.pipe for other in self._workers) if forked else ()
            process = context.Process(
                target=work,
                args=(theirs, source, slots, inherited),
                name=f"preprocess-{number}",
                daemon=True,
            )
            process.start()
            worker.process = process
            theirs.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def results(self, chunks: Iterable[Chunk]) -> Iterator[EncodedChunk]:
        """The encoded chunks in order. The arrays of each stay valid until the next one is requested."""
        chunks = iter(chunks)
        turns: deque[_Worker] = deque()
        while True:
            while (worker := self._with_room()) is not None and (chunk := next(chunks, None)) is not None:
                worker.send(chunk)
                turns.append(worker)
            if not turns:
                return
            if turns[0].results:
                yield _or_raise(turns.popleft().results.popleft())
            else:
                self._collect()

    def _with_room(self) -> _Worker | None:
        """The worker that gets the next chunk: of those with room, the one with the least to do."""
        free = (worker for worker in self._workers if worker.has_room())
        return min(free, key=lambda worker: worker.working, default=None)

    def _collect(self) -> None:
        """Waits for a result, then takes in all there are."""
        by_pipe = {worker.pipe: worker for worker in self._workers if worker.working}
        for pipe in wait(by_pipe):
            worker = by_pipe[pipe]
            worker.results.append(worker.receive())
            worker.working -= 1

    def close(self) -> None:
        """Ends the workers, whatever they are doing."""
        started = [worker.process for worker in self._workers if worker.process is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join()
        for worker in self._workers:
            worker.pipe.close()


def _or_raise(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result


def can_fork() -> bool:
    """Whether this process can be forked safely: on Linux, while it has no other Python thread.

    The system libraries of macOS do not survive a fork, and a lock held by another thread is never released
    in the child.
    """
    return sys.platform == "linux" and threading.active_count() == 1


@contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def work(
    pipe: Connection,
    source: EncodeJob | ChunkEncoder,
    slots: SharedSlots | None,
    inherited: Sequence[Connection],
) -> None:
    """A worker's whole life: encode what comes through `pipe` until the other end closes.

    `inherited` are the parent's ends, which a fork copies: as long as a worker held one, no worker would
    notice the parent's exit.
    """
    # Ctrl-C reaches every process of the terminal; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if inherited:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    for end in inherited:
        end.close()
    # Also guards a forked worker from the library's threads, which stayed behind in the parent.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    inbox: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
    # Reading on its own thread keeps both ends from waiting for each other with full pipes.
    threading.Thread(target=_drain, args=(pipe, inbox), daemon=True).start()
    try:
        encoder = source if isinstance(source, ChunkEncoder) else _outcome(ChunkEncoder, source)
        if isinstance(encoder, BaseException):
            pipe.send(encoder)
            return
        pipe.send(encoder.facts)
        while (chunk := inbox.get()) is not None:
            result = _outcome(encoder, chunk)
            pipe.send(result if slots is None else slots.pack(result))
    except (BrokenPipeError, ConnectionResetError):
        return


def _outcome(action: Callable[[Any], Any], argument: Any) -> Any:
    """What the action returns, or its error, for the parent to raise when its turn comes."""
    try:
        return action(argument)
    except (MegazeroError, OSError) as error:
        return error
    except Exception:
        return RuntimeError(f"a preprocessing worker failed:\n{traceback.format_exc()}")


def _drain(pipe: Connection, inbox: queue.SimpleQueue[Chunk | None]) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)
