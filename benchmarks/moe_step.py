"""Time of a whole training step of a GPT with experts, against a dense one of the same FLOPs per token.

    python benchmarks/moe_step.py --threads 2

The 23M GPT of train_step.py (6 layers of 512) at sequence 512 in fp32, on one process: forward, backward and
AdamW. Contenders take one step each, round after round:

    dense      MLPs of 2048
    dropless   8 experts of 1024 in each layer, of which each token goes to two; nothing is dropped
    capacity   the same with room for 1.25 of an even share

One JSON line per contender: the median over the rounds of the ratio of its step's time to that of the dense
step of the same round, and the same ratio of FLOPs (`account/flops.py`), which counts the routers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import Shape
from benchmarks.contenders.ours import make_config, vocabulary_of
from benchmarks.data_efficiency import build
from benchmarks.teams import write
from megazero.config.rules.table import check
from megazero.config.steps import Progress
from megazero.config.tree.config import Config
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.errors import ConfigError
from megazero.layers.inputs import NOTHING_SKIPPED
from megazero.models.batch import Batch, Places
from megazero.models.targets import Targets
from megazero.mpu.malloc import keep_freed_memory
from megazero.mpu.rng import sample_keys
from megazero.train.parts.families import TokenFlops
from megazero.train.step.engine import Engine
from megazero.train.step.timers import Timers

SHAPE = Shape(dtype="fp32", accumulations=1)
EXPERTS = {
    "num_experts": (8,),
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 1024,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.01,),
}
MODELS = {
    "dense": {},
    "dropless": EXPERTS,
    "capacity": {**EXPERTS, "moe_expert_capacity_factor": 1.25},
}


def configured(changes: dict[str, object]) -> Config:
    """The dense configuration with these settings of the model.

    Raises:
        ConfigError: they do not go together.
    """
    config = make_config(SHAPE, 1, ParallelConfig(), ZeroConfig())
    config = config.model_copy(update={"model": config.model.model_copy(update=changes)})
    if wrong := check(config, 1):
        raise ConfigError(wrong)
    return config


def step_seconds(engine: Engine, turn: int) -> float:
    """The time of one step, on the batch of this round."""
    keys = torch.from_numpy(sample_keys(1, range(SHAPE.micro_batch)))
    batches = [
        Batch(tokens, Targets(labels), places=Places(sample_keys=keys))
        for tokens, labels in SHAPE.batches(turn)
    ]
    began = time.perf_counter()
    engine.train_step(batches, Progress(iteration=turn), Timers())
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    configs = {name: configured(changes) for name, changes in MODELS.items()}
    engines = {name: build(config, SHAPE) for name, config in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(args.rounds + 2):
        for name, engine in engines.items():
            found = step_seconds(engine, turn)
            if turn >= 2:
                seconds[name].append(found)
    flops = {
        name: TokenFlops(config, vocabulary_of(SHAPE))(SHAPE.sequence, NOTHING_SKIPPED)
        for name, config in configs.items()
    }
    lines = []
    for name, found in seconds.items():
        ratios = [a / b for a, b in zip(found, seconds["dense"], strict=True)]
        lines.append(
            {
                "benchmark": "moe_step",
                "contender": name,
                "threads": args.threads,
                "step_ms": round(1e3 * statistics.median(found), 1),
                "of_dense": round(statistics.median(ratios), 3),
                "of_dense_flops": round(flops[name] / flops["dense"], 3),
                "rounds": args.rounds,
            }
        )
    write(lines, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
