"""Encode chunks on several processes, with results in order.

Each chunk goes to the worker with the fewest chunks, so that a worker on a busy core does not hold up the
others; the parent restores the order. On Linux the tokenizer is loaded once, workers are forked with it, and
they return arrays in shared memory. If fork is unavailable or unsafe (other threads exist), workers are
spawned, load the tokenizer themselves, and return everything through their pipes.
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
from typing import Any, Protocol

from megazero.data.workers import can_fork, or_raise, result_or_error, signals_held, start_worker
from megazero.data_tools.preprocessing.chunks import CHUNK_BYTES, JsonlChunk
from megazero.data_tools.preprocessing.encode import ChunkEncoder, EncodedChunk, EncodeJob, EncoderFacts
from megazero.data_tools.preprocessing.slots import SharedSlots
from megazero.data_tools.preprocessing.watch import PATIENCE, Watched, WorkerPatience, WorkerWatch
from megazero.errors import DataError

# The most chunks that a worker has: _QUEUED to encode, one in work and one waiting, so that it never idles;
# _AHEAD with those whose results wait for their turn, so that it can run ahead of a slow worker. This bounds
# memory.
_QUEUED, _AHEAD = 2, 8


class EncoderPool(Protocol):
    """A context manager of what encodes chunks; `facts` describes the encoder."""

    facts: EncoderFacts

    def results(self, chunks: Iterable[JsonlChunk]) -> Iterator[EncodedChunk]:
        """Encode chunks in order. The arrays of a result stay valid until the next result is requested."""

    def __enter__(self) -> EncoderPool: ...

    def __exit__(self, *_: object) -> None: ...


class InlinePool(EncoderPool):
    """This process as the only worker."""

    def __init__(self, job: EncodeJob):
        self._encoder = ChunkEncoder(job)
        self.facts = self._encoder.facts

    def results(self, chunks: Iterable[JsonlChunk]) -> Iterator[EncodedChunk]:
        """Encode chunks in order."""
        return map(self._encoder, chunks)

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there are no other processes."""


@dataclass
class _Worker(Watched):
    """The parent's view of a worker.

    Attributes:
        working: the chunks that were sent to the worker, and whose results have not arrived.
        results: the results that have arrived, and wait for their turn.
    """

    name: str
    pipe: Connection
    slots: SharedSlots | None
    process: BaseProcess
    working: deque[JsonlChunk] = field(default_factory=deque, init=False)
    results: deque[EncodedChunk | BaseException] = field(default_factory=deque, init=False)
    done: int = field(default=0, init=False)
    verdict: str | None = field(default=None, init=False)

    def has_room(self) -> bool:
        return len(self.working) < _QUEUED and len(self.working) + len(self.results) < _AHEAD

    def is_busy(self) -> bool:
        return bool(self.working)

    def send(self, chunk: JsonlChunk) -> None:
        self.working.append(chunk)
        try:
            self.pipe.send(chunk)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._death() from error

    def take_in(self) -> None:
        """Wait for the result of the worker's first chunk."""
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
        chunk = f" It held {self.working[0]}." if self.working else ""
        if self.verdict is not None:
            how, advice = self.verdict, "Run again."
        elif code is not None and code < 0:
            how = f"ended by signal {signal.Signals(-code).name}"
            advice = "If memory ran out, use fewer `--workers`."
        else:
            how, advice = f"ended with status {code}", "If memory ran out, use fewer `--workers`."
        return DataError(
            f"{self.name} (process {self.process.pid}) must finish its work, but {how}; nothing was "
            f"written.{chunk} {advice}"
        )


class WorkerPool(EncoderPool):
    """Several worker processes; a context manager that ends them.

    Raises what a worker raises, and DataError naming a worker that is killed, or stopped or busy for longer
    than `patience`. `chunk_bytes` is the usual size of a chunk.
    """

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
        # Started with the first chunk, because its thread would keep other pools from forking.
        self._watch = WorkerWatch(self._workers, patience, lambda: self._waits)
        # Kept to the end, because freeing it would copy the pages that the workers share.
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
        # Room for one token per byte of the chunk; larger results go through the pipe.
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

    def results(self, chunks: Iterable[JsonlChunk]) -> Iterator[EncodedChunk]:
        """Encode chunks in order. The arrays of a result stay valid until the next result is requested."""
        self._watch.start()
        chunks = iter(chunks)
        turns: deque[_Worker] = deque()
        while True:
            while (worker := self._freest()) is not None and (chunk := next(chunks, None)) is not None:
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

    def _freest(self) -> _Worker | None:
        """The worker with the fewest chunks, of those with room for another; None if none has room."""
        free = (worker for worker in self._workers if worker.has_room())
        return min(free, key=lambda worker: len(worker.working), default=None)

    def _collect(self) -> None:
        """Wait for a result, then take all that have arrived."""
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
        """Kill the workers; a second call does nothing."""
        self._watch.stop()
        for worker in self._workers:
            worker.process.kill()  # a stopped process would not handle SIGTERM
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()


def work(pipe: Connection, source: EncodeJob | ChunkEncoder, slots: SharedSlots | None) -> None:
    """Run a worker: encode the chunks that come through `pipe` until the other end closes."""
    # Threads of the library do not survive a fork, so a forked worker must not use them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    inbox: queue.SimpleQueue[JsonlChunk | None] = queue.SimpleQueue()
    # Chunks are read on a thread, because both ends could wait for each other with full pipes.
    threading.Thread(target=_drain, args=(pipe, inbox), daemon=True).start()
    encoder = source if isinstance(source, ChunkEncoder) else result_or_error(ChunkEncoder, source)
    if isinstance(encoder, BaseException):
        pipe.send(encoder)
        return
    pipe.send(encoder.facts)
    while (chunk := inbox.get()) is not None:
        result = result_or_error(encoder, chunk)
        pipe.send(result if slots is None else slots.pack(result))


def _drain(pipe: Connection, inbox: queue.SimpleQueue[JsonlChunk | None]) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)
