"""Is a commit slower than another? Step time and start-up time of two checkouts, run in turn.

    python benchmarks/two_commits.py OLD_DIR NEW_DIR
    python benchmarks/two_commits.py OLD_DIR NEW_DIR --only "alone|P=2" --rounds 5
    python benchmarks/two_commits.py OLD_DIR NEW_DIR --count

Each configuration trains a small GPT for some steps in the old checkout, in the new one, in the old one, and
so on, through `pretrain_gpt.py` and its `--metrics-jsonl`: the two need share nothing but flags. Both
must be compiled. One JSON line per configuration: `step` and `startup` are the medians of the new checkout
divided by those of the old one (above 1, it became slower), `step_rounds` the ratio of each round, and
`step_fastest` that of the fastest steps, which a busy machine disturbs least. The seconds of a step are those
of its record; the first steps of each run do not count. Start-up lasts from starting the processes until the
first step is on record.

`--count` measures what no other load can change: how many operators of torch and functions of the package
rank 0 calls in a step, at both checkouts. They are the difference between a short run and a longer one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 4095 "
    "--tokenizer-type NullTokenizer --mock-data --micro-batch-size 2 --global-batch-size 8 --lr 1e-4 "
    "--lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 "
    "--eval-interval 1000000 --log-interval 1000000"
)
WARMUP = 3  # steps of each run that do not count
PATIENCE = 600.0  # seconds for a run
# name -> (ranks, flags)
CONFIGURATIONS = {
    "alone bf16": (1, "--bf16"),
    "alone fp32": (1, ""),
    "D=2 stage 2 bf16": (2, "--bf16 --zero-stage 2"),
    "P=2 1f1b bf16": (2, "--bf16 --pipeline-model-parallel-size 2 --pipeline-schedule 1f1b"),
    "T=2 bf16": (2, "--bf16 --tensor-model-parallel-size 2"),
}


@dataclass(frozen=True)
class Run:
    """The times of one training run.

    Attributes:
        startup: seconds until the first step was on record.
        steps: seconds of each later step that counts.
        loss: the loss of the last step, in nats.
    """

    startup: float
    steps: tuple[float, ...]
    loss: float

    @property
    def step(self) -> float:
        """The median step, in seconds."""
        return statistics.median(self.steps)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a checkout's folder")
    parser.add_argument("new", type=Path, help="another")
    parser.add_argument("--only", metavar="REGEX", default="", help="only those whose name it matches")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each checkout")
    parser.add_argument("--steps", type=int, default=15, help="steps per run, besides the first ones")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads in all, shared by the ranks"
    )
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file too")
    parser.add_argument("--count", action="store_true", help="count what a step does instead of timing it")
    args = parser.parse_args()
    for folder in (args.old, args.new):
        if not (folder / "pretrain_gpt.py").is_file():
            parser.error(f"`{folder}` must be a checkout, but has no pretrain_gpt.py")
    return args


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(checkout: Path, ranks: int, flags: str, args: argparse.Namespace, front: Sequence[str] = ()) -> Run:
    """Train in a checkout.

    Args:
        checkout: its folder.
        ranks: number of processes.
        flags: of the configuration.
        args: of this script.
        front: the script that runs the training script, and its first arguments.

    Raises:
        SystemExit: it failed; with what it printed.
    """
    checkout = checkout.resolve()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as cleanup:
        folder = Path(scratch)
        metrics, log = folder / "metrics.jsonl", cleanup.enter_context((folder / "log").open("w+"))
        command = [
            *(sys.executable, *front, str(checkout / "pretrain_gpt.py"), *MODEL.split(), *flags.split()),
            *("--train-iters", str(WARMUP + args.steps), "--metrics-jsonl", str(metrics)),
            *("--device", args.device),
        ]
        common = {
            **os.environ,
            "PYTHONPATH": str(checkout),
            "OMP_NUM_THREADS": str(max(1, args.threads // ranks)),
            **{"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        }
        began = time.monotonic()
        processes = []
        for rank in range(ranks):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)  # if it still runs, before the wait
            processes.append(process)
        startup = None
        while any(process.poll() is None for process in processes):
            if startup is None and metrics.exists() and metrics.stat().st_size > 0:
                startup = time.monotonic() - began
            if time.monotonic() - began > PATIENCE or any(process.poll() for process in processes):
                break
            time.sleep(0.005 if startup is None else 0.1)
        if any(process.poll() != 0 for process in processes) or startup is None:
            log.seek(0)
            raise SystemExit(f"error: `{' '.join(command)}` in {checkout} failed:\n{log.read()[-3000:]}")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Run(startup, tuple(record["seconds"] for record in records[WARMUP:]), records[-1]["lm_loss"])


def count(name: str, args: argparse.Namespace) -> dict:
    """The JSON object of what a configuration's step does."""
    ranks, flags = CONFIGURATIONS[name]
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for checkout in (args.old, args.new):
            totals = []
            for steps in (0, args.steps):
                file = Path(scratch) / f"{len(found)}-{steps}.json"
                front = [str(Path(__file__).with_name("counted.py")), str(file)]
                train(checkout, ranks, flags, argparse.Namespace(**vars(args) | {"steps": steps}), front)
                totals.append(json.loads(file.read_text()))
            found.append([(long - short) / args.steps for short, long in zip(*totals, strict=True)])
    (operators, functions) = zip(*found, strict=True)
    return {
        "benchmark": "two_commits",
        "configuration": name,
        "operators_per_step": operators,
        "functions_per_step": functions,
    }


def compare(name: str, args: argparse.Namespace) -> dict:
    """The JSON object of a configuration."""
    ranks, flags = CONFIGURATIONS[name]
    old, new = [], []
    for _ in range(args.rounds):
        old.append(train(args.old, ranks, flags, args))
        new.append(train(args.new, ranks, flags, args))

    def both(value) -> tuple[float, float]:
        return statistics.median(map(value, old)), statistics.median(map(value, new))

    steps, startups = both(lambda run: run.step), both(lambda run: run.startup)
    fastest = [min(second for run in runs for second in run.steps) for runs in (old, new)]
    return {
        "benchmark": "two_commits",
        "configuration": name,
        "step": round(steps[1] / steps[0], 4),
        "step_rounds": [round(b.step / a.step, 4) for a, b in zip(old, new, strict=True)],
        "step_fastest": round(fastest[1] / fastest[0], 4),
        "startup": round(startups[1] / startups[0], 4),
        "step_seconds": [round(value, 4) for value in steps],
        "startup_seconds": [round(value, 2) for value in startups],
        "loss": [old[-1].loss, new[-1].loss],
        "machine": f"{platform.machine()} {os.cpu_count()} cpus",
    }


def main() -> int:
    args = arguments()
    chosen = [name for name in CONFIGURATIONS if re.search(args.only, name)]
    if not chosen:
        print(f"error: `--only` must match a configuration, but {args.only!r} matches none", file=sys.stderr)
        return 2
    for name in chosen:
        line = json.dumps((count if args.count else compare)(name, args))
        print(line, flush=True)
        if args.output:
            with args.output.open("a") as file:
                file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
