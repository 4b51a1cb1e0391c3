"""What the guards of a training cost: whole steps with all defaults beside steps with none, in turns.

    python benchmarks/guards_cost.py             # one process and two
    python benchmarks/guards_cost.py --ranks 2 --steps 40 --seq-length 64

The model is the GPT of 23 million parameters of `train_step.py`, on random data. Each rank holds three
trainings, one with the default guards and two with none, and makes a step of each in turn, with all that a
loop does between steps. The ratio of the two without guards says how near equal trainings come to each other.
The comparison of copies, made every 500 steps, is timed by itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.config.resolve import parse_config
from megazero.mpu.launch import Launch, join, leave
from megazero.train.assemble import assemble
from megazero.train.guards.agreement import settings_and_code
from megazero.train.loop import Loop
from megazero.train.observe.evaluation import PeriodicEvaluation
from megazero.train.observe.monitors.base import CompositeMonitor
from megazero.train.pretraining import Pretraining
from megazero.train.step.state import TrainState
from proofs.kill_job import _free_port

MODEL = (
    "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --vocab-size 8192 --mock-data "
    "--micro-batch-size 4 --lr 1e-4 --train-iters 100000 --eval-iters 0 --log-interval 100 "
    "--hidden-dropout 0 --attention-dropout 0"
)
NONE = "--on-spike off --check-weights-interval 0 --straggler-interval 0 --no-verify-data"


class Trained:
    """One training, step by step."""

    def __init__(self, flags: str, ranks: int, joined):
        argv = [*MODEL.split(), *flags.split(), "--global-batch-size", str(8 * ranks)]
        config = parse_config(argv, world_size=ranks).config
        run = assemble(config, joined, Pretraining())
        evaluations = PeriodicEvaluation(lambda split, state: None, None, ())
        self.loop = Loop(run.meters, run.feeds, CompositeMonitor(), None, evaluations)
        self.state = TrainState()

    def step(self) -> float:
        """Make a step; its wall time in seconds."""
        began = time.perf_counter()
        _, self.state = self.loop._judged(self.loop._step(self.state))
        return time.perf_counter() - began


def rank(number: int, ranks: int, port: int, steps: int, length: int, answers) -> None:
    """One rank's part."""
    import os

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    sized = f"--seq-length {length}"
    argv = [*MODEL.split(), *sized.split(), "--global-batch-size", str(8 * ranks)]
    config = parse_config(argv, world_size=ranks).config
    joined = join(config.parallel, Launch(number, ranks, number), 1, partial(settings_and_code, config))
    kinds = {"bare": NONE, "guarded": "", "twin": NONE}
    teams = {name: Trained(f"{sized} {flags}", ranks, joined) for name, flags in kinds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in teams}
    compared = []
    for round_ in range(steps + 3):
        names = list(teams)
        for name in names[round_ % 3 :] + names[: round_ % 3]:
            taken = teams[name].step()
            if round_ >= 3:
                seconds[name].append(taken)
    copies = teams["guarded"].loop.concerns[-1]
    for _ in range(5):
        began = time.perf_counter()
        copies.compare(teams["guarded"].state)
        compared.append(time.perf_counter() - began)
    if number == 0:
        answers.put({**seconds, "compared": compared})
    leave(joined)


def median_ratio(seconds: list[float], others: list[float]) -> float:
    """The median over the rounds of one training's step over another's."""
    return statistics.median(mine / other for mine, other in zip(seconds, others, strict=True))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-length", type=int, default=512)
    flags = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for ranks in flags.ranks:
        answers, port = context.Queue(), _free_port()
        work = [
            context.Process(target=rank, args=(number, ranks, port, flags.steps, flags.seq_length, answers))
            for number in range(ranks)
        ]
        for each in work:
            each.start()
        found = answers.get()
        for each in work:
            each.join()
        bare, guarded, twin = (statistics.median(found[name]) for name in ("bare", "guarded", "twin"))
        compared = statistics.median(found["compared"])
        line = {
            "ranks": ranks,
            "sequence length": flags.seq_length,
            "rounds": flags.steps,
            "bare step, s": round(bare, 4),
            "guarded / bare, ratio of medians": round(guarded / bare, 4),
            "guarded / bare, median of ratios": round(median_ratio(found["guarded"], found["bare"]), 4),
            "twin / bare, ratio of medians": round(twin / bare, 4),
            "twin / bare, median of ratios": round(median_ratio(found["twin"], found["bare"]), 4),
            "comparison of copies, s": round(compared, 4),
            "of a step, every 500": round(compared / 500 / bare, 6),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
