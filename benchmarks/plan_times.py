"""Planned and measured times of steps on this machine, for layouts of two ranks.

    python benchmarks/plan_times.py --device PROFILE.json [--rounds 3] [--output FILE.json]

PROFILE.json is what `megazero profile --nproc 2` wrote. Each round plans every layout, in two processes at
once as two ranks would be, and trains it in two Gloo processes, in turns; the table has the medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from datetime import timedelta
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.mpu.launch import Launch
from megazero.mpu.torch_group import join_file_world, leave_world
from megazero.plan.device import Device
from megazero.plan.job import PlannedJob
from megazero.plan.measured import step_seconds
from megazero.plan.plan import Plan
from megazero.plan.prices import Prices
from megazero.plan.times import StepTimes

SHAPE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 4096 --mock-data "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-4 --train-iters 100 --device cpu "
)
LAYOUTS = {
    "T2": "--tensor-model-parallel-size 2",
    "T2, SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "P2": "--pipeline-model-parallel-size 2",
    "P2, gpipe": "--pipeline-model-parallel-size 2 --pipeline-schedule gpipe",
    "P2, V2": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "P2, zb-h1": "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
    "P2, full recompute": "--pipeline-model-parallel-size 2 --recompute-granularity full",
    "D2, ZeRO 0": "",
    "D2, ZeRO 1": "--zero-stage 1",
    "D2, ZeRO 2": "--zero-stage 2",
    "D2, ZeRO 3": "--zero-stage 3",
    "C2": "--context-parallel-size 2 --hidden-dropout 0 --attention-dropout 0",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    flags = parser.parse_args()
    planned: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    measured: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, spawn.Pool(2) as pool:
        for number, name in product(range(flags.rounds), LAYOUTS):
            store = f"{folder}/{number}-{len(measured[name])}-{list(LAYOUTS).index(name)}"
            ranks = [(name, str(flags.device), store, rank) for rank in range(2)]
            planned[name].append(statistics.mean(pool.starmap(plan, ranks, chunksize=1)))
            measured[name].append(max(pool.starmap(train, ranks, chunksize=1)))
    print(f"{'layout':<22}{'planned':>10}{'measured':>11}{'off':>8}")
    rows = []
    for name in LAYOUTS:
        ours, real = statistics.median(planned[name]), statistics.median(measured[name])
        print(f"{name:<22}{ours * 1e3:>7.0f} ms{real * 1e3:>8.0f} ms{ours / real - 1:>+8.1%}")
        rows.append({"layout": name, "planned": planned[name], "measured": measured[name]})
    off = [abs(statistics.median(r["planned"]) / statistics.median(r["measured"]) - 1) for r in rows]
    print(f"mean {statistics.mean(off):.1%}, worst {max(off):.1%}, within 10%: {sum(x <= 0.1 for x in off)}")
    if flags.output is not None:
        flags.output.write_text(json.dumps(rows, indent=1) + "\n")


def plan(name: str, device: str, store: str, rank: int) -> float:
    """The seconds of a step of a layout, on paper; its kernels run here."""
    torch.set_num_threads(1)
    job = job_of(name)
    stages = Plan.of(job, timed=True).stages
    return StepTimes.of(stages, Prices(Device.load(device), 2)).seconds


def train(name: str, device: str, store: str, rank: int) -> float:
    """The seconds of a step of a layout that is trained."""
    torch.set_num_threads(1)
    join_file_world(store, rank, 2, timedelta(seconds=120))
    try:
        return step_seconds(job_of(name).config, Launch(rank, 2, rank), torch.device("cpu"))
    finally:
        leave_world()


def job_of(name: str) -> PlannedJob:
    """The job of a layout."""
    return PlannedJob(
        parse_config((SHAPE + LAYOUTS[name]).split(), world_size=2).config, 2, False, Progress(), "cpu"
    )


if __name__ == "__main__":
    main()
