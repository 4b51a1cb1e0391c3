"""Chunks on several processes, results in order.

Chunk i goes to worker i mod N and its result is read from there, so order costs nothing and no lock is
shared. Workers are started fresh ("spawn"): nothing of the parent's threads or signal handlers leaks
into them. A worker that dies closes its pipe, and the parent knows; a parent that dies closes its end,
and they leave.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from data_tools.preprocessing.chunks import Chunk
from data_tools.preprocessing.encode import ChunkEncoder, EncodedChunk, EncodeJob, EncoderFacts
from megazero.errors import DataError, MegazeroError

# Chunks a worker holds at most: one in work and one waiting, so it never idles; memory stays bounded.
_AHEAD = 2


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
    naming the worker if one is killed."""

    facts: EncoderFacts

    def __init__(self, job: EncodeJob, workers: int):
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        try:
            for number in range(workers):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                process = context.Process(
                    target=work, args=(theirs, job), name=f"preprocess-{number}", daemon=True
                )
                process.start()
                self._processes.append(process)
                theirs.close()
            every = [self._receive(worker) for worker in range(workers)]
            self.facts = every[0]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def results(self, chunks: Iterable[Chunk]) -> Iterator[EncodedChunk]:
        """The encoded chunks in order."""
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
        return result

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


def work(pipe: Connection, job: EncodeJob) -> None:
    """A worker's whole life: encode what comes through `pipe` until the other end closes."""
    # Ctrl-C reaches every process of the terminal; only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    inbox: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
    # Reading on its own thread keeps both ends from waiting for each other with full pipes.
    threading.Thread(target=_drain, args=(pipe, inbox), daemon=True).start()
    try:
        encoder = ChunkEncoder(job)
        pipe.send(encoder.facts)
        while (chunk := inbox.get()) is not None:
            pipe.send(encoder(chunk))
    except BrokenPipeError:
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
