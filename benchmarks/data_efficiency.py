"""Time of a step that drops tokens, cuts sequences or leaves out layers, against the dense step, interleaved.

    python benchmarks/data_efficiency.py --threads 2

Two GPTs at sequence 512 in fp32, on one process: the 23M one of train_step.py (6 layers of 512), and a deeper
one of 24M (12 layers of 384). Contenders take one step each, round after round:

    dense       every layer sees every token
    random-ltd  all layers but the first and the last see half of the tokens
    half        sequences of half the length (a curriculum)
    off         random-LTD configured, past its ramp: what the idle feature costs
    layer-drop  every other inner layer is left out

One JSON line per contender and model: the median over the rounds of the ratio of its step's time to that of
the dense step of the same round, and the same ratio of FLOPs (`account/flops.py`), which is what a step
without overhead would reach.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import Shape
from benchmarks.contenders.ours import make_config, vocabulary_of
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.layers.inputs import NOTHING_SKIPPED, Skipping
from megazero.models.batch import Batch, Places
from megazero.models.targets import Targets
from megazero.mpu.context import solo_context
from megazero.mpu.malloc import keep_freed_memory
from megazero.mpu.rng import sample_keys
from megazero.train.build import build_engine
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.families import TokenFlops
from megazero.train.step.engine import Engine
from megazero.train.step.timers import Timers

MODELS = {
    "6x512": Shape(dtype="fp32", accumulations=1),
    "12x384": Shape(dtype="fp32", accumulations=1, layers=12, hidden=384, heads=6),
}


@dataclass(frozen=True)
class Contender:
    """What a step leaves out: its share of the sequence's length, and what layers skip."""

    length: float
    skipping: Skipping


class FixedSkipping:
    """A plan that says the same of every step."""

    def __init__(self, skipping: Skipping):
        self.skipping = skipping

    def at(self, progress: Progress) -> Skipping:
        return self.skipping


def contenders(shape: Shape) -> dict[str, Contender]:
    inner = range(1, shape.layers - 1)
    scales = tuple(0.0 if layer in inner and layer % 2 else 1.0 for layer in range(shape.layers))
    return {
        "dense": Contender(1.0, NOTHING_SKIPPED),
        "random-ltd": Contender(1.0, Skipping(shape.sequence // 2, inner)),
        "half": Contender(0.5, NOTHING_SKIPPED),
        "off": Contender(1.0, Skipping(shape.sequence, inner)),
        "layer-drop": Contender(1.0, Skipping(scales=scales)),
    }


def build(config: Config, shape: Shape) -> Engine:
    context = solo_context()
    chunks = build_chunks(config, vocabulary_of(shape), context)
    return build_engine(config, training_plan_of(config, 1), chunks, context)


def step_seconds(engine: Engine, shape: Shape, contender: Contender) -> float:
    columns = int(shape.sequence * contender.length)
    keys = torch.from_numpy(sample_keys(1, range(shape.micro_batch)))
    batches = [
        Batch(
            tokens[:, :columns].contiguous(),
            Targets(labels[:, :columns].contiguous()),
            places=Places(sample_keys=keys),
        )
        for tokens, labels in shape.batches(0)
    ]
    engine.schedules = replace(engine.schedules, skipping=FixedSkipping(contender.skipping))
    began = time.perf_counter()
    engine.train_step(batches, Progress(), Timers())
    return time.perf_counter() - began


def measure(name: str, shape: Shape, rounds: int, threads: int) -> list[dict]:
    config = make_config(shape, 1, ParallelConfig(), ZeroConfig())
    engine, all_of = build(config, shape), contenders(shape)
    seconds: dict[str, list[float]] = {each: [] for each in all_of}
    for turn in range(rounds + 2):
        for each, contender in all_of.items():
            found = step_seconds(engine, shape, contender)
            if turn >= 2:
                seconds[each].append(found)
    per_token = TokenFlops(config, vocabulary_of(shape))
    flops = {
        each: per_token(int(shape.sequence * c.length), c.skipping) * c.length for each, c in all_of.items()
    }
    lines = []
    for each, found in seconds.items():
        ratios = [a / b for a, b in zip(found, seconds["dense"], strict=True)]
        lines.append(
            {
                "benchmark": "data_efficiency",
                "model": name,
                "contender": each,
                "threads": threads,
                "step_ms": round(1e3 * statistics.median(found), 1),
                "of_dense": round(statistics.median(ratios), 3),
                "of_dense_flops": round(flops[each] / flops["dense"], 3),
                "rounds": rounds,
            }
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    for name in args.models:
        for line in measure(name, MODELS[name], args.rounds, args.threads):
            print(json.dumps(line), flush=True)
            if args.output:
                with args.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
