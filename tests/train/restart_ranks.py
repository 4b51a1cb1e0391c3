"""Jobs of several Gloo ranks that stop and continue, one after the other: ``restart_ranks.py FOLDER``.

FOLDER/<job>/ has the checkpoints, metrics and what the ranks said; FOLDER/statuses.json how each ended.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from benchmarks.kill_job import Job

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --micro-batch-size 2 --lr 1e-3 --lr-warmup-iters 3 "
    "--lr-decay-style cosine --eval-iters 0 --log-interval 100"
)
SAVING = "--train-iters 8 --save-interval 3"
ENDLESS = "--train-iters 100000 --tensor-model-parallel-size 2"


def start(folder: Path, ranks: int, flags: str) -> Job:
    """A job that saves to its folder, and continues what is there."""
    folder.mkdir(exist_ok=True)
    run = ["--save", str(folder / "run"), "--load", str(folder / "run")]
    argv = [*MODEL.split(), *flags.split(), *run, "--metrics-jsonl", str(folder / "metrics.jsonl")]
    return Job(argv, folder, 0, [None] * ranks)


def to_its_end(folder: Path, ranks: int, flags: str) -> list[int]:
    """How the ranks of a job ended."""
    return start(folder, ranks, flags).run()


def asked_to_stop(folder: Path) -> list[int]:
    """As `to_its_end`; one of two ranks gets a signal after two steps."""
    job = start(folder, 2, ENDLESS)
    deadline = time.monotonic() + 60
    path = folder / "metrics.jsonl"
    while not (path.exists() and path.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    job.send(signal.SIGUSR1, 1)
    return job.run()


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
    (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
