"""Run a function on several processes of this machine, which form a world."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from megazero.errors import CommunicationError
from megazero.mpu.cpu_cores import usable_cores
from megazero.mpu.launch import Launch, choose_backend, choose_device
from megazero.mpu.torch_group import leave_world, start_world

PATIENCE = timedelta(minutes=5)
Work = Callable[[Launch, torch.device], object]


def on_ranks(ranks: int, kind: str, work: Work) -> Any:
    """Run `work` on `ranks` processes and their devices of a kind; returns rank 0's result, through JSON.

    Raises:
        CommunicationError: a process failed; its traceback is in the message.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_rank, (ranks, kind, work, folder), nprocs=ranks)
        except Exception as error:
            raise CommunicationError(f"A rank that measured failed: {error}") from error
        return json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))


def _rank(rank: int, ranks: int, kind: str, work: Work, folder: str) -> None:
    """Run `work` on one process, in the world of all; rank 0 writes its result."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = choose_device(kind, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        backend = choose_backend("auto", device)
        start_world(backend, rank, ranks, PATIENCE, init_method=f"file://{folder}/store")
    result = work(Launch(rank, ranks, rank), device)
    if ranks > 1:
        leave_world()
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")
