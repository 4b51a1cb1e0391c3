"""Runs chunks on several processes, with results in order.

Each chunk goes to the worker with the least to do, so that one on a busy core does not hold up the rest; the
parent remembers the order. On Linux the tokenizer is loaded once and the workers are forked with it; they
return their arrays in shared memory. If fork is unavailable or unsafe (other threads exist), they are started
fresh ("spawn"), load the tokenizer themselves and send everything through their pipes.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from data_tools.preprocessing.chunks import CHUNK_BYTES, Chunk
from data_tools.preprocessing.encode import ChunkEncoder, EncodedChunk, EncodeJob, EncoderFacts
from data_tools.preprocessing.slots import SharedSlots
from data_tools.preprocessing.watch import PATIENCE, Watched, WorkerPatience, WorkerWatch
from megazero.data.workers import can_fork, or_raise, result_or_error, signals_held, start_worker
from megazero.errors import DataError

# The most chunks a worker has: one in work and one waiting, so that it never idles; and, counting those whose
# result waits for its turn, enough that it need not stop for one that is held up. This bounds memory.
_QUEUED, _AHEAD = 2, 8


class InlinePool:
    """This process as the only worker."""

    def __init__(self, job: EncodeJob):
        self._encoder = ChunkEncoder(job)
        self.facts = self._encoder.facts

    def results(self, chunks: Iterable[Chunk]) -> Iterator[EncodedChunk]:
        """The encoded chunks in order."""
        return map(self._encoder, chunks)

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_: object) -> None:
        """End nothing: there are no other processes."""


@dataclass
class _Worker(Watched):
    """The parent's view of a worker. `working` are the chunks sent to it whose result is not yet here,
    `results` are those that are and wait for their turn; `done` counts all that ever came. `verdict` says why
    the watch killed it."""

    name: str
    pipe: Connection
    slots: SharedSlots | None
    process: BaseProcess
    working: deque[Chunk] = field(default_factory=deque, init=False)
    results: deque[EncodedChunk | BaseException] = field(default_factory=deque, init=False)
    done: int = field(default=0, init=False)
    verdict: str | None = field(default=None, init=False)

    def has_room(self) -> bool:
        return len(self.working) < _QUEUED and len(self.working) + len(self.results) < _AHEAD

    def is_busy(self) -> bool:
        return bool(self.working)

    def send(self, chunk: Chunk) -> None:
        self.working.append(chunk)
        try:
            self.pipe.send(chunk)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._death() from error

    def take_in(self) -> None:
        """Wait for the result of the first chunk that it has."""
        self.results.append(self.receive())
        self.working.popleft()
        self.done += 1

    def receive(self) -> Any:
        try:
            result = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._death() from error
        return result if self.slots is None else self.slots.unpack(result)

    def _death(self) -> DataError:
        self.process.join(timeout=5)
        code = self.process.exitcode
        held = f" It held {self.working[0]}." if self.working else ""
        if self.verdict is not None:
            how, advice = self.verdict, "Run again."
        elif code is not None and code < 0:
            how = f"ended by signal {signal.Signals(-code).name}"
            advice = "If memory ran out, use fewer `--workers`."
        else:
            how, advice = f"ended with status {code}", "If memory ran out, use fewer `--workers`."
        return DataError(
            f"{self.name} (process {self.process.pid}) must finish its work, but {how}; nothing was "
            f"written.{held} {advice}"
        )


class WorkerPool:
    """Several worker processes; a context manager that ends them. Raises what a worker raised, and DataError
    naming the worker if one is killed, stopped or busy beyond `patience`. `chunk_bytes` is the usual size of
    a chunk."""

    facts: EncoderFacts

    def __init__(
        self,
        job: EncodeJob,
        workers: int,
        chunk_bytes: int = CHUNK_BYTES,
        patience: WorkerPatience = PATIENCE,
    ):
        self._workers: list[_Worker] = []
        self._waits = False
        # Begins with the first chunk: before, a thread of ours would keep other pools from forking.
        self._watch = WorkerWatch(self._workers, patience, lambda: self._waits)
        # Kept to the end: freeing it would copy the pages that the workers still share.
        self._encoder = ChunkEncoder(job) if can_fork() else None
        try:
            for number in range(workers):
                self._start(number, job, chunk_bytes)
            facts = [or_raise(worker.receive()) for worker in self._workers]
            self.facts = facts[0]
        except BaseException:
            self.close()
            raise

    def _start(self, number: int, job: EncodeJob, chunk_bytes: int) -> None:
        encoder = self._encoder
        # Room for one token per byte of the chunk; what needs more goes through the pipe.
        slots = None if encoder is None else SharedSlots(_AHEAD, chunk_bytes * encoder.dtype.itemsize)
        source, forked = encoder or job, encoder is not None
        others = [worker.pipe for worker in self._workers]
        with signals_held():
            pipe, process = start_worker(
                work, source, slots, forked=forked, others=others, name=f"preprocess-{number}"
            )
            self._workers.append(_Worker(f"worker {number}", pipe, slots, process))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def results(self, chunks: Iterable[Chunk]) -> Iterator[EncodedChunk]:
        """The encoded chunks in order. The arrays of each stay valid until the next one is requested."""
        self._watch.start()
        chunks = iter(chunks)
        turns: deque[_Worker] = deque()
        while True:
            while (worker := self._with_room()) is not None and (chunk := next(chunks, None)) is not None:
                with self._waiting():
                    worker.send(chunk)
                turns.append(worker)
            if not turns:
                return
            if turns[0].results:
                yield or_raise(turns.popleft().results.popleft())
            else:
                with self._waiting():
                    self._collect()

    def _with_room(self) -> _Worker | None:
        """The worker that gets the next chunk: of those with room, the one with the least to do."""
        free = (worker for worker in self._workers if worker.has_room())
        return min(free, key=lambda worker: len(worker.working), default=None)

    def _collect(self) -> None:
        """Wait for a result, then take in all there are."""
        by_pipe: dict[object, _Worker] = {worker.pipe: worker for worker in self._workers if worker.working}
        for pipe in wait([worker.pipe for worker in by_pipe.values()]):
            by_pipe[pipe].take_in()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def close(self) -> None:
        """End the workers, whatever they are doing; a second call does nothing."""
        self._watch.stop()
        for worker in self._workers:
            worker.process.kill()  # SIGTERM would wait until a stopped one goes on
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()


def work(pipe: Connection, source: EncodeJob | ChunkEncoder, slots: SharedSlots | None) -> None:
    """A worker's whole life: encode what comes through `pipe` until the other end closes."""
    # Also guards a forked worker from the library's threads, which stayed behind in the parent.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    inbox: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
    # Reading on its own thread keeps both ends from waiting for each other with full pipes.
    threading.Thread(target=_drain, args=(pipe, inbox), daemon=True).start()
    encoder = source if isinstance(source, ChunkEncoder) else result_or_error(ChunkEncoder, source)
    if isinstance(encoder, BaseException):
        pipe.send(encoder)
        return
    pipe.send(encoder.facts)
    while (chunk := inbox.get()) is not None:
        result = result_or_error(encoder, chunk)
        pipe.send(result if slots is None else slots.pack(result))


def _drain(pipe: Connection, inbox: queue.SimpleQueue[Chunk | None]) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)
