"""Jobs of several Gloo ranks that stop and continue, one after the other: ``restart_ranks.py FOLDER``.

FOLDER/<job>/ has the checkpoints, metrics and what the ranks said; FOLDER/statuses.json how each ended.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megazero.checkpoint.disk import Disk
from megazero.data.indexed.writer import IndexedDatasetWriter
from proofs.kill_job import Job
from tests.checkpoint.faulty_disk import FaultyDisk, Verdict, kill
from tests.checkpoint.power_cut import Change

SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --micro-batch-size 2 --lr 1e-3 --lr-warmup-iters 3 "
    "--lr-decay-style cosine --eval-iters 0 --log-interval 100"
)
MODEL = f"{SHAPE} --mock-data"
SAVING = "--train-iters 8 --save-interval 3 --dataloader-type cyclic"
CYCLIC = "--train-iters 8 --save-interval 2 --dataloader-type cyclic --global-batch-size 12 --split 1,0,0"
ENDLESS = "--train-iters 100000 --tensor-model-parallel-size 2"


def start(
    folder: Path, ranks: int, flags: str, model: str = MODEL, disks: Sequence[Disk | None] | None = None
) -> Job:
    """A job that saves to its folder, and continues what is there."""
    folder.mkdir(exist_ok=True)
    run = ["--save", str(folder / "run"), "--load", str(folder / "run")]
    argv = [*model.split(), *flags.split(), *run, "--metrics-jsonl", str(folder / "metrics.jsonl")]
    return Job(argv, folder, 0, disks or [None] * ranks)


def to_its_end(folder: Path, ranks: int, flags: str, model: str = MODEL) -> list[int]:
    """How the ranks of a job ended."""
    return start(folder, ranks, flags, model).run()


def asked_to_stop(folder: Path) -> list[int]:
    """As `to_its_end`; one of two ranks gets a signal after two steps."""
    job = start(folder, 2, ENDLESS)
    deadline = time.monotonic() + 60
    path = folder / "metrics.jsonl"
    while not (path.exists() and path.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    job.send(signal.SIGUSR1, 1)
    return job.run()


def cyclic_data(folder: Path) -> str:
    """The flags of a model that trains on 50 samples: its eight steps of twelve samples take two epochs."""
    with IndexedDatasetWriter(folder / "text", np.uint16) as writer:
        writer.add_raw(np.random.default_rng(5).integers(0, 64, 801), np.full(89, 9))
    return f"{SHAPE} --data-path {folder / 'text'}"


def killed(folder: Path, model: str) -> list[int]:
    """As `to_its_end`; one of two ranks is killed with -9 in the middle of its third save."""

    def dies(change: Change) -> Verdict | None:
        third = "iter_0000006" in str(change.path) and change.name == "write"
        return Verdict(kill, len(change.data) // 2) if third else None

    job = start(folder, 2, CYCLIC, model, [None, FaultyDisk(dies)])
    deadline = time.monotonic() + 60
    while not job.statuses and time.monotonic() < deadline:
        time.sleep(0.01)
        job.poll()
    job.end()
    return [job.statuses[rank] for rank in job.ranks]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    statuses = {
        # Two replicas of micro-batches of 2: the global batch is 4, which nobody says.
        "straight": to_its_end(folder / "straight", 4, f"{SAVING} --tensor-model-parallel-size 2"),
        "stopped": to_its_end(
            folder / "stopped", 4, f"{SAVING} --tensor-model-parallel-size 2 --exit-interval 5"
        ),
    }
    for name, ranks, flags in (
        ("on 4", 4, "--tensor-model-parallel-size 2"),
        ("on 2", 2, "--pipeline-model-parallel-size 2"),
        ("on 1", 1, ""),
    ):
        shutil.copytree(folder / "stopped", folder / name)
        statuses[name] = to_its_end(folder / name, ranks, f"{SAVING} {flags}")
    statuses["signal"] = asked_to_stop(folder / "signal")
    statuses["duration"] = to_its_end(folder / "duration", 2, f"{ENDLESS} --exit-duration-in-mins 0.01")
    # What `torchrun` runs in two processes of its own.
    statuses["launched"] = to_its_end(folder / "launched", 2, f"{SAVING} --tensor-model-parallel-size 2")
    model = cyclic_data(folder)
    statuses["cyclic"] = to_its_end(folder / "cyclic", 1, CYCLIC, model)
    (folder / "killed.json").write_text(json.dumps(killed(folder / "cyclic on 3", model)))
    statuses["cyclic on 3"] = to_its_end(folder / "cyclic on 3", 3, CYCLIC, model)
    (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
