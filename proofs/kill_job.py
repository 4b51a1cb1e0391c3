"""The ranks of a training run as forked processes that can be killed; see `kill_sweep.py`."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.random
import sympy  # noqa: F401  (torch loads it late: here once instead of in every rank)
import torch

from megazero.checkpoint.disk import Disk
from megazero.config.resolve import parse_config
from megazero.errors import MegazeroError
from megazero.mpu.launch import Launch
from megazero.train.pretraining import pretrain
from tests.checkpoint.faulty_disk import Counter, FaultyDisk

PATIENCE = 60.0
GRACE = 0.2


class Job:
    """The forked ranks of one training. A fork of a process that has torch loaded starts in milliseconds.

    Args:
        flags: the flags of the training run.
        folder: where the ranks' output goes.
        salt: the seed of the generators of Python, numpy and torch.
        disks: each rank's disk; None for a plain one.
    """

    def __init__(self, flags: list[str], folder: Path, salt: int, disks: Sequence[Disk | None]):
        port = _free_port()
        self.folder = folder
        self.ranks = range(len(disks))
        self.alive: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        for rank in self.ranks:
            child = os.fork()
            if child == 0:
                _be_rank(flags, folder, Launch(rank, len(disks), rank), port, salt, disks[rank])
            self.alive[rank] = child

    def poll(self) -> None:
        """Note who has ended."""
        for rank, pid in list(self.alive.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.alive[rank]
                self.statuses[rank] = os.waitstatus_to_exitcode(status)

    def send(self, number: int, rank: int | None = None) -> None:
        """Send a signal to a rank, or to all, as far as they are alive."""
        for each in self.alive if rank is None else {rank} & self.alive.keys():
            os.kill(self.alive[each], number)

    def wait(self, seconds: float) -> None:
        """Wait until all have ended or the time is over."""
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.005)
            self.poll()

    def run(self, seconds: float = PATIENCE) -> list[int]:
        """Wait, and return how the ranks ended; those still running when the time is over are killed."""
        self.wait(seconds)
        self.send(signal.SIGKILL)
        self.wait(seconds)
        return [self.statuses[rank] for rank in self.ranks]

    def end(self) -> None:
        """End all ranks as launchers do when one is gone: ask the others, then force them."""
        self.wait(GRACE)
        self.send(signal.SIGTERM)
        self.wait(GRACE)
        self.send(signal.SIGKILL)
        self.wait(PATIENCE)

    def finish(self) -> None:
        """Wait until all have ended successfully.

        Raises:
            RuntimeError: one did not.
        """
        deadline = time.monotonic() + PATIENCE
        while self.alive and not any(self.statuses.values()) and time.monotonic() < deadline:
            time.sleep(0.005)
            self.poll()
        if self.alive or any(self.statuses.values()):
            self.send(signal.SIGKILL)
            self.wait(PATIENCE)
            said = "\n".join(self.said(rank)[-1500:] for rank in self.ranks)
            raise RuntimeError(f"ranks ended with {self.statuses}:\n{said}")

    def said(self, rank: int) -> str:
        """What a rank printed."""
        return (self.folder / f"rank{rank}.txt").read_text(errors="replace")


def _be_rank(flags: list[str], folder: Path, launch: Launch, port: int, salt: int, disk: Disk | None) -> None:
    """The rest of a forked rank's life."""
    status, rank = 99, launch.rank
    try:
        output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        random.seed(salt + rank)
        np.random.seed(salt + rank)
        torch.manual_seed(salt + rank)
        pretrain(parse_config(flags, world_size=launch.world_size).config, launch, disk)
        if isinstance(disk, FaultyDisk) and isinstance(disk.fault, Counter):
            log = [(change.name, str(change.path)) for change in disk.fault.log]
            (folder / f"changes{rank}.json").write_text(json.dumps(log))
        status = 0
    except MegazeroError as error:
        print(f"error: {error}", file=sys.stderr)
        status = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # unloading torch would take longer than the training


def _free_port() -> int:
    """A port that no connection takes by chance, as it is below the range those are given."""
    for port in itertools.islice(iter(lambda: random.SystemRandom().randrange(15_000, 32_000), None), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port was found")
