"""Chunks on several processes, results in order.

Chunk i goes to worker i mod N and its result is read from there, so order costs nothing and no lock is
shared. On Linux the tokenizer is loaded once and the workers are forked with it; they hand their arrays over
in shared memory. Where fork is unavailable or unsafe (other threads exist) they are started fresh ("spawn"),
load the tokenizer themselves and send everything through their pipes. A worker that dies closes its pipe,
and the parent knows; a parent that dies closes its end, and they leave.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

from data_tools.preprocessing.chunks import CHUNK_BYTES, Chunk
from data_tools.preprocessing.encode import ChunkEncoder, EncodedChunk, EncodeJob, EncoderFacts
from data_tools.preprocessing.slots import SharedSlots
from megazero.errors import DataError, MegazeroError

# Chunks a worker holds at most: one in work, the others waiting, so that it never idles while the parent
# writes; memory stays bounded.
_AHEAD = 4
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
        """Nothing to end."""


class Crew:
    """Several worker processes; a context manager that ends them. Raises what a worker raised, and DataError
    naming the worker if one is killed. `chunk_bytes` is the usual size of a chunk."""

    facts: EncoderFacts

    def __init__(self, job: EncodeJob, workers: int, chunk_bytes: int = CHUNK_BYTES):
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        # Kept to the end: to free it would copy the pages that the workers still share.
        self._encoder = ChunkEncoder(job) if can_fork() else None
        self._slots: list[SharedSlots | None] = [None] * workers
        if self._encoder is not None:
            # A token for every byte of the chunk; what needs more goes through the pipe.
            capacity = chunk_bytes * self._encoder.dtype.itemsize
            self._slots = [SharedSlots(_AHEAD, capacity) for _ in range(workers)]
        try:
            for number in range(workers):
                self._start(number, job)
            every = [self._receive(worker) for worker in range(workers)]
            self.facts = every[0]
        except BaseException:
            self.close()
            raise

    def _start(self, number: int, job: EncodeJob) -> None:
        forked = self._encoder is not None
        context = multiprocessing.get_context("fork" if forked else "spawn")
        # A signal must neither reach a child that still has the parent's handlers nor leave one unrecorded.
        with _signals_held() if forked else nullcontext():
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            source = self._encoder if forked else job
            inherited = tuple(self._pipes) if forked else ()
            process = context.Process(
                target=work,
                args=(theirs, source, self._slots[number], inherited),
                name=f"preprocess-{number}",
                daemon=True,
            )
            process.start()
            self._processes.append(process)
            theirs.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def results(self, chunks: Iterable[Chunk]) -> Iterator[EncodedChunk]:
        """The encoded chunks in order. The arrays of each hold until the next one is asked for."""
        workers = len(self._pipes)
        sent = received = 0
        for chunk in chunks:
            self._send(sent % workers, chunk)
            sent += 1
            if sent - received == workers * _AHEAD:
                yield self._receive(received % workers)
                received += 1
        for number in range(received, sent):
            yield self._receive(number % workers)

    def _send(self, worker: int, chunk: Chunk) -> None:
        try:
            self._pipes[worker].send(chunk)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._death(worker) from error

    def _receive(self, worker: int) -> Any:
        try:
            result = self._pipes[worker].recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._death(worker) from error
        if isinstance(result, BaseException):
            raise result
        slots = self._slots[worker]
        return result if slots is None else slots.unpack(result)

    def _death(self, worker: int) -> DataError:
        process = self._processes[worker]
        process.join(timeout=5)
        code = process.exitcode
        how = (
            f"by signal {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"with status {code}"
        )
        return DataError(
            f"worker {worker} (process {process.pid}) must finish its work, but ended {how}; nothing was "
            "written. If memory ran out, use fewer `--workers`."
        )

    def close(self) -> None:
        """Ends the workers, whatever they are doing."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


def can_fork() -> bool:
    """Whether this process can be forked safely: on Linux, while it has no other Python thread. (macOS' system
    libraries do not survive it.)"""
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

    `inherited` are the parent's ends, which a fork copies: while a worker held one, no worker would see the
    parent leave.
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
        encoder = source if isinstance(source, ChunkEncoder) else ChunkEncoder(source)
        pipe.send(encoder.facts)
        while (chunk := inbox.get()) is not None:
            encoded = encoder(chunk)
            pipe.send(encoded if slots is None else slots.pack(encoded))
    except (BrokenPipeError, ConnectionResetError):
        return
    except (MegazeroError, OSError) as error:
        pipe.send(error)
    except Exception:
        pipe.send(RuntimeError(f"a preprocessing worker failed:\n{traceback.format_exc()}"))


def _drain(pipe: Connection, inbox: queue.SimpleQueue[Chunk | None]) -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):
        inbox.put(None)
