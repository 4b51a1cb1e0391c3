"""Run a configuration on the ranks of a layout: as threads of this process, or as Gloo processes."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from megazero.config.derive import replicas_per_node
from megazero.config.tree.config import Config
from megazero.errors import CommunicationError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch, close_groups, open_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.torch_group import join_file_world, leave_world
from megazero.verify.record import STEPS, Record, record_training

_SECONDS = 600.0


def run_alone(config: Config, steps: int = STEPS) -> Record:
    """Record a training in a single process."""
    return record_training(config, solo_context(), steps)


def run_in_threads(config: Config, grid: ProcessGrid, steps: int = STEPS) -> list[Record]:
    """Record a training whose ranks are threads; returns a record per rank."""
    world, node = ThreadWorld(grid.world_size), replicas_per_node(config.zero)

    def work(rank: int) -> Record:
        return record_training(config, thread_context(world, grid, rank, node_size=node), steps)

    return world.run(work)


def run_in_world(rank: int, world_size: int, config: Config, grid: ProcessGrid, steps: int = STEPS) -> Record:
    """Record this rank's training in a world of CPU processes that it has joined."""
    assert grid.world_size == world_size
    launch, node = Launch(rank, world_size, rank), replicas_per_node(config.zero)
    context = open_context(config.parallel, launch, torch.device("cpu"), node_size=node)
    try:
        return record_training(config, context, steps)
    finally:
        close_groups(context)


def run_in_processes(config: Config, grid: ProcessGrid, steps: int = STEPS) -> list[Record]:
    """Record a training whose ranks are Gloo processes, started for it; returns a record per rank.

    Raises:
        CommunicationError: a process failed, with its traceback in the message, or did not answer.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ends, processes = [], []
        for rank in range(grid.world_size):
            here, there = spawn.Pipe()
            args = (there, store, rank, config, grid, steps)
            processes.append(spawn.Process(target=_serve, args=args, daemon=True))
            processes[-1].start()
            ends.append(here)
        try:
            return [_receive(rank, end) for rank, end in enumerate(ends)]
        finally:
            for end in ends:
                end.close()
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()


def _serve(
    connection: Connection, store: str, rank: int, config: Config, grid: ProcessGrid, steps: int
) -> None:
    torch.set_num_threads(1)
    try:
        join_file_world(store, rank, grid.world_size, timedelta(seconds=_SECONDS))
        connection.send(run_in_world(rank, grid.world_size, config, grid, steps))
    except Exception:
        connection.send(traceback.format_exc())
    finally:
        leave_world()
        # Tensors are passed through this process's memory, so it stays alive until the other end is closed.
        connection.poll(_SECONDS)


def _receive(rank: int, connection: Connection) -> Record:
    if not connection.poll(_SECONDS):
        raise CommunicationError(f"rank {rank} did not answer within {_SECONDS:.0f} s")
    answer = connection.recv()
    if not isinstance(answer, Record):
        raise CommunicationError(f"rank {rank} failed:\n{answer}")
    return answer
