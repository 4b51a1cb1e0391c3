"""A pool of worker processes that are started once per test session and reused: real Gloo ranks.

`WorkerPool.run(function, world_size)` calls ``function(rank, world_size, *args)`` in that many workers, which
have joined a fresh Gloo world; results come back in rank order. A worker that fails reports its traceback,
one that hangs is ended after the timeout, and the pool starts anew. Workers are forked from the fork server.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from tests.forks import fork_server, start_unseen

TIMEOUT = 120.0


class WorkerFailure(AssertionError):
    """What the workers' tracebacks said."""


def _serve(connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    from megazero.mpu.torch_group import leave_world, start_world

    while (task := connection.recv()) is not None:
        function, rank, world_size, store, args = task
        try:
            import torch.distributed as dist

            start_world(
                "gloo", rank, world_size, timedelta(seconds=60), store=dist.FileStore(store, world_size)
            )
            result = ("ok", function(rank, world_size, *args))
        except BaseException:
            result = ("failed", traceback.format_exc())
        finally:
            leave_world()
        connection.send(result)


class WorkerPool:
    """Workers of one test session; started at first use."""

    def __init__(self) -> None:
        self._context = fork_server()
        self._workers: list[tuple[multiprocessing.Process, Connection]] = []

    def run(self, function, world_size: int, *args) -> list:
        """The results of ``function(rank, world_size, *args)`` from `world_size` ranks."""
        while len(self._workers) < world_size:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            chosen = self._workers[:world_size]
            for rank, (_, connection) in enumerate(chosen):
                connection.send((function, rank, world_size, store, args))
            return self._collect(chosen)

    def close(self) -> None:
        """End all workers."""
        for process, connection in self._workers:
            if process.is_alive():
                connection.send(None)
            process.join(5)
            if process.is_alive():
                process.kill()
        self._workers = []

    def _start(self) -> None:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there,), daemon=True)
        start_unseen(process)
        self._workers.append((process, here))

    def _collect(self, chosen) -> list:
        deadline = time.monotonic() + TIMEOUT
        results, failures = [], []
        for rank, (_, connection) in enumerate(chosen):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                failures.append(f"rank {rank}: no answer within {TIMEOUT} s")
                continue
            state, value = connection.recv()
            results.append(value)
            if state == "failed":
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            self._abandon()
            raise WorkerFailure("\n".join(failures))
        return results

    def _abandon(self) -> None:
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers = []
