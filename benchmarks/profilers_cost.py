"""What the profilers of a training cost: steps with each beside steps with none, in turns.

    python benchmarks/profilers_cost.py             # one process and two
    python benchmarks/profilers_cost.py --ranks 2 --steps 40 --flags "--zero-stage 2"

The model is a GPT of 7 million parameters on random data. Each rank holds a training for each row, and makes
a step of each in turn, with all that a loop does in a step. One JSON line: the median over rounds of a step's
time as a multiple of that of the training without profilers in the same round. `twin` is another without:
how far equal trainings come apart. `trace`, `memory` and `counted` are the cost of a step that they look at;
they look at chosen steps alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
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
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.train.pretraining import Pretraining
from megazero.train.step.state import TrainState
from proofs.kill_job import _free_port

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 8191 --mock-data "
    "--micro-batch-size 4 "
    "--tokenizer-type NullTokenizer --lr 1e-4 --lr-decay-style constant --train-iters 100000 --eval-iters 0 "
    "--hidden-dropout 0 --attention-dropout 0 --num-workers 0 --seq-length 64"
)
ROWS = {
    "bare": "",
    "twin": "",
    "breakdown": "--wall-clock-breakdown --log-interval 10",
    "comms": "--comms-logger",
    "trace": "--profile --profile-step-start 0 --profile-step-end 100000 --profile-max-mb 100000",
}
WARMUP = 3


class Trained:
    """One training, step by step; the profilers of single steps look at all of them."""

    def __init__(self, name: str, flags: str, joined):
        config = parse_config([*MODEL.split(), *flags.split()], world_size=joined.world_size).config
        run = assemble(config, build_vocabulary(config), joined, Pretraining())
        evaluations = PeriodicEvaluation(lambda split, state: None, None, ())
        self.loop = Loop(run.meters, run.feeds, CompositeMonitor(), None, evaluations)
        self.state = TrainState()

    def step(self) -> float:
        """Make a step; its wall time in seconds."""
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            self.state = self.loop._step(self.state).state
        return time.perf_counter() - began


class OfOneStep(Trained):
    """A training whose profiler of one step looks at every step."""

    def step(self) -> float:
        (part,) = self.loop.meters.profiler.parts
        part.step = self.state.iteration + 1
        return super().step()


def rank(number: int, ranks: int, port: int, steps: int, flags: str, folder: str, answers) -> None:
    """One rank's part."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with contextlib.redirect_stdout(io.StringIO()):
        common = f"{flags} --global-batch-size {8 * ranks} --profile-dir {folder}"
        config = parse_config([*MODEL.split(), *common.split()], world_size=ranks).config
        joined = join(config.parallel, Launch(number, ranks, number), 1, partial(settings_and_code, config))
        teams = {name: Trained(name, f"{common} {own}", joined) for name, own in ROWS.items()}
        teams["memory"] = OfOneStep("memory", f"{common} --memory-timeline-step 1", joined)
        teams["counted"] = OfOneStep("counted", f"{common} --flops-profiler", joined)
        seconds: dict[str, list[float]] = {name: [] for name in teams}
        names = list(teams)
        for round_ in range(steps + WARMUP):
            at = round_ % len(names)
            for name in names[at:] + names[:at]:
                taken = teams[name].step()
                if round_ >= WARMUP:
                    seconds[name].append(taken)
        leave(joined)
    if number == 0:
        ratios = {
            name: round(statistics.median(t / b for t, b in zip(times, seconds["bare"], strict=True)), 4)
            for name, times in seconds.items()
            if name != "bare"
        }
        answers.put(
            {"ranks": ranks, "flags": flags, "bare_ms": 1e3 * statistics.median(seconds["bare"]), **ratios}
        )


def measure(ranks: int, steps: int, flags: str) -> dict[str, object]:
    """The ratios on so many ranks of this host."""
    spawning, port = multiprocessing.get_context("spawn"), _free_port()
    answers = spawning.Queue()
    with tempfile.TemporaryDirectory() as folder:
        more = (ranks, port, steps, flags, folder, answers)
        processes = [spawning.Process(target=rank, args=(number, *more)) for number in range(ranks)]
        for process in processes:
            process.start()
        answer = answers.get(timeout=1200)
        for process in processes:
            process.join()
    return answer


def main() -> None:
    """Measure, and print a line for each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--flags", default="", help="further flags of the trainings, such as a layout")
    flags = parser.parse_args()
    for ranks in flags.ranks:
        print(json.dumps(measure(ranks, flags.steps, flags.flags)), flush=True)


if __name__ == "__main__":
    main()
