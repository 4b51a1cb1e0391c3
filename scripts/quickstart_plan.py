"""Chooses how the quickstart trains: times a few steps of the real model, and fits the run into its time.

    python scripts/quickstart_plan.py --minutes 3 --layouts 2x1 1x2 --entry pretrain_gpt.py -- FLAGS

A layout RxT is R replicas of T threads each. Every layout is timed in fp32, the fastest also in bf16 where
matrix products in bf16 are not slower than in fp32. The error stream gets the measurements, the output the
choice in one line: replicas, threads, precision (fp32 or bf16), steps. The minutes include the
timed steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WARM_UP = 2
TIMED = 6
LONGEST_TRIAL = 0.1
"""Minutes that the steps of one trial may take."""
START_AND_SAVE = 10.0
"""Seconds of a training in which it makes no step."""
EVALUATIONS = 17
"""Steps that take as long as the run's five evaluations of ten batches, a third of a step each."""
SAFETY = 0.95
"""Share of the time that is planned: no machine is always as fast as measured."""
FEWEST = 20


@dataclass(frozen=True)
class Candidate:
    """A way to train: replicas, threads of each, and the precision, fp32 or bf16."""

    replicas: int
    threads: int
    precision: str = "fp32"

    def __str__(self) -> str:
        ranks = "rank" if self.replicas == 1 else "ranks"
        threads = "thread" if self.threads == 1 else "threads"
        return f"{self.replicas} {ranks} x {self.threads} {threads}, {self.precision}"


@dataclass(frozen=True)
class Choice:
    """The fastest candidate and how many steps it makes.

    Attributes:
        candidate: the fastest.
        steps: how many fit.
        measured: seconds per step of all that were tried.
        seconds: time that is left for the training.
    """

    candidate: Candidate
    steps: int
    measured: Mapping[Candidate, float]
    seconds: float

    def table(self) -> str:
        """The measurements and the choice, for people."""
        lines = ["seconds per step, measured:"]
        for candidate, taken in self.measured.items():
            mark = "  <- the fastest" if candidate == self.candidate and len(self.measured) > 1 else ""
            lines.append(f"    {candidate!s:<30}{taken:7.3f}{mark}")
        lines.append(f"{self.steps:,} steps fit into the {self.seconds:.0f} s that are left")
        return "\n".join(lines)


def steps_within(seconds: float, per_step: float, most: int) -> int:
    """How many steps of `per_step` seconds a training of `seconds` makes, from `FEWEST` to `most`."""
    fitting = SAFETY * (seconds - START_AND_SAVE) / per_step - EVALUATIONS
    return max(FEWEST, min(most, int(fitting)))


def choose(
    layouts: Sequence[Candidate],
    try_bf16: bool,
    time_of: Callable[[Candidate], float],
    seconds: float,
    most: int,
) -> Choice:
    """Time the layouts in fp32, and the fastest of them in bf16 if it may pay; take the fastest of all.

    Args:
        layouts: those to try.
        try_bf16: whether bf16 may be faster than fp32.
        time_of: measures the seconds per step of a candidate.
        seconds: time for the training; what was measured counts as part of it.
        most: steps that are enough.
    """
    began = time.monotonic()
    measured = {layout: time_of(layout) for layout in layouts}
    fastest = min(measured, key=measured.__getitem__)
    if try_bf16:
        in_bf16 = replace(fastest, precision="bf16")
        measured[in_bf16] = time_of(in_bf16)
        fastest = min(measured, key=measured.__getitem__)
    seconds -= time.monotonic() - began
    return Choice(fastest, steps_within(seconds, measured[fastest], most), measured, seconds)


def seconds_per_step(entry: str, flags: Sequence[str], candidate: Candidate) -> float:
    """The median of a few real steps.

    Raises:
        SystemExit: the training fails; its own words are printed.
    """
    ranks = int(os.environ.get("MODEL_RANKS", "1")) * candidate.replicas
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        own = ["--train-iters", str(WARM_UP + TIMED), "--exit-duration-in-mins", str(LONGEST_TRIAL)]
        own += ["--eval-iters", "0", "--log-interval", "1000", "--metrics-jsonl", str(metrics)]
        precision = ["--bf16"] if candidate.precision == "bf16" else []
        ended = subprocess.run(
            [*launch, entry, *flags, *own, *precision],
            env={**os.environ, "OMP_NUM_THREADS": str(candidate.threads)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ended.returncode:
            sys.exit(f"{ended.stdout}\nerror: a trial of {candidate} ended with status {ended.returncode}")
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    taken = [record["seconds"] for record in records]
    return statistics.median(taken[WARM_UP:] or taken[-1:])


def may_gain_from_bf16(threads: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether a training may be faster in bf16: on a GPU, or where its products are not slower than fp32's.

    A processor without instructions for bf16 imitates it, slowly; some that have them are slower even so.
    """
    import torch

    from megazero.train.observe.host import measure_matmul_rate

    if torch.cuda.is_available():
        return True
    if not has_bf16_instructions(cpuinfo):
        return False
    torch.set_num_threads(threads)
    in_bf16, in_fp32 = (measure_matmul_rate(dtype) / 1e9 for dtype in (torch.bfloat16, torch.float32))
    if in_bf16 < in_fp32:
        print(
            f"products in bf16 are slower than in fp32 here: {in_bf16:.0f} and {in_fp32:.0f} GFLOP/s",
            file=sys.stderr,
        )
    return in_bf16 >= in_fp32


def has_bf16_instructions(cpuinfo: Path) -> bool:
    """Whether the processor says that it multiplies bf16."""
    try:
        words = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return False
    return bool(words & {"amx_bf16", "avx512_bf16", "bf16"})


def layout_of(text: str) -> Candidate:
    """``2x1`` as two replicas of one thread."""
    replicas, _, threads = text.partition("x")
    if not (replicas.isdecimal() and threads.isdecimal() and int(replicas) and int(threads)):
        raise argparse.ArgumentTypeError(f"must be REPLICASxTHREADS, such as 2x1, but is {text!r}")
    return Candidate(int(replicas), int(threads))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, choose, print."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument(
        "--minutes", type=float, required=True, help="time for the training and the timed steps"
    )
    parser.add_argument("--layouts", type=layout_of, nargs="+", required=True, metavar="RxT")
    parser.add_argument("--entry", required=True, help="pretrain_gpt.py or pretrain_bert.py")
    parser.add_argument("--most-steps", type=int, default=2000, help="what is enough (default 2000)")
    options, flags = parser.parse_args(words[:end]), words[end + 1 :]

    def time_of(candidate: Candidate) -> float:
        per_step = seconds_per_step(options.entry, flags, candidate)
        print(f"timed {candidate}: {per_step:.3f} s per step", file=sys.stderr, flush=True)
        return per_step

    print(f"timing {TIMED} steps of each way to train", file=sys.stderr, flush=True)
    try_bf16 = may_gain_from_bf16(options.layouts[0].threads)
    choice = choose(options.layouts, try_bf16, time_of, 60 * options.minutes, options.most_steps)
    print(choice.table(), file=sys.stderr, flush=True)
    chosen = choice.candidate
    print(chosen.replicas, chosen.threads, chosen.precision, choice.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
