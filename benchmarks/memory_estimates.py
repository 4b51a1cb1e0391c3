"""Whose estimate of memory is nearest: a plan's, Megatron-LM's theoretical report, or DeepSpeed's estimators.

    python benchmarks/memory_estimates.py [--output FILE.json]

Models train a step on a CPU, in ranks that are threads; the bytes on the fullest rank's device are those of
its store and the most that operators' results take. Megatron-LM's and DeepSpeed's figures are their formulas,
which count bf16 training with fp32 gradients, masters and Adam's moments; DeepSpeed's leave activations out.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megazero.account.memory import MemoryMeter
from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.config.tree.config import Config
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.plan.job import PlannedJob
from megazero.plan.plan import Plan
from megazero.plan.training import Model
from megazero.train.build import build_model
from megazero.train.step.timers import Timers
from tests.plan.unnoticed import unnoticed

SHAPE = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 8192 --mock-data "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --lr 1e-3 --train-iters 1 --bf16 "
    "--accumulate-allreduce-grads-in-fp32 "
)
LAYOUTS = {
    "one rank": ("", 1),
    "D2, ZeRO 1": ("--zero-stage 1", 2),
    "D2, ZeRO 2": ("--zero-stage 2", 2),
    "D4, ZeRO 3": ("--zero-stage 3", 4),
    "T2, SP, selective": (
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-activations --zero-stage 1",
        2,
    ),
    "T2": ("--tensor-model-parallel-size 2", 2),
    "P2": ("--pipeline-model-parallel-size 2", 2),
    "P4, full recompute": ("--pipeline-model-parallel-size 4 --recompute-granularity full", 4),
    "T2 x P2 x D2, ZeRO 1": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1",
        8,
    ),
}


@dataclass(frozen=True)
class Row:
    """Bytes on the fullest device: measured, and by each estimate; None where there is none."""

    layout: str
    measured: int
    plan: int
    megatron: int
    deepspeed: int | None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row_of(name, words, ranks) for name, (words, ranks) in LAYOUTS.items()]
    print(f"{'layout':<24}{'measured':>12}{'plan':>9}{'Megatron-LM':>13}{'DeepSpeed':>11}")
    for row in rows:
        off = [None if x is None else x / row.measured - 1 for x in (row.plan, row.megatron, row.deepspeed)]
        plan, megatron, deepspeed = ("-" if x is None else f"{x:+.1%}" for x in off)
        print(f"{row.layout:<24}{row.measured / 2**20:>8.1f} MiB{plan:>9}{megatron:>13}{deepspeed:>11}")
    if flags.output is not None:
        flags.output.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")


def row_of(name: str, words: str, ranks: int) -> Row:
    """A layout, trained for a step, and estimated."""
    config = parse_config(f"{SHAPE} {words} --global-batch-size 16".split(), world_size=ranks).config
    job = PlannedJob(config, ranks, False, Progress(), "cpu")
    measured = max(measured_bytes(job))
    return Row(
        name, measured, Plan.of(job).fullest.device_bytes, megatron(config, job), deepspeed(config, job)
    )


def measured_bytes(job: PlannedJob) -> list[int]:
    """The bytes on each rank's device at its fullest moment of a step."""
    world = ThreadWorld(job.ranks)

    def work(rank: int) -> int:
        context = unnoticed(thread_context(world, job.grid, rank))
        engine = build_model(job.vocabulary, context, job.config, job.training_plan)
        batches = job.batches(context, job.micro_batches)
        meter = MemoryMeter.of(engine.optimizer.store, engine.executor)
        with meter.over_a_step():
            engine.train_step(batches, Progress(), Timers())
        return sum(meter.sizes()["device"].values())

    return world.run(work)


def megatron(config: Config, job: PlannedJob) -> int:
    """Megatron-LM's theoretical report (2025): its most loaded shard, and one formula for activations.

    18 bytes a parameter, or 6 + 12 / D with the distributed optimizer; activations s b h (18 + 4 f / h) a
    layer with sequence parallelism and selective recomputation, 1.05 s b h (10 + 24 / T) for anything else.
    """
    m, grid = config.model, job.grid
    h, layers, f = m.hidden_size, m.num_layers, m.ffn_size
    s, b, t, p = m.seq_length, config.batch.micro_batch_size, grid.tp, grid.pp
    block = 4 * h * h + 2 * h * f + 4 * h
    shard = (layers * block / p + job.vocabulary.padded * h) / t
    a_parameter = 6 + 12 / grid.dp if config.zero.stage else 18
    deep = min(p, job.micro_batches)
    if config.parallel.sequence_parallel and config.recompute.granularity == "selective":
        activations = s * b * h * (18 + 4 * f / h) * layers + 8 * s * b * p + s * b * h * p
        activations += 4 * s * b * h * (1 + job.vocabulary.padded / h) if p == 1 else 0
        activations /= t
    else:
        activations = 1.05 * s * b * h * (10 + 24 / t) * layers / p * deep
    return int(shard * a_parameter + activations)


def deepspeed(config: Config, job: PlannedJob) -> int | None:
    """DeepSpeed's estimators of stages 2 and 3 (`..._mem_needs_all_cold`) without offload; else none."""
    count = Model.of(job).parameters
    if job.grid.tp * job.grid.pp > 1 or config.zero.stage < 2:
        return None
    if config.zero.stage == 2:
        return int(2 * count + 18 * count / job.ranks)
    largest = job.vocabulary.padded * config.model.hidden_size
    return int(4 * largest + 18 * count / job.ranks)


if __name__ == "__main__":
    main()
