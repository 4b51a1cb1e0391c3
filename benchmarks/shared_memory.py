"""Is the shared memory between ranks of one host worth its code? Whole training steps with it and over Gloo.

    python benchmarks/shared_memory.py                   # 23M parameters on two ranks, fewer on four
    python benchmarks/shared_memory.py --quick           # four lines, the small model throughout
    python benchmarks/shared_memory.py --only "P=2.*bf16"

Both sides of a line live at the same time in processes of their own and train in turn, so that a noisy
moment hits both: `shared` is `--distributed-backend auto`, `gloo` the same over sockets. One JSON line per
layout and dtype: seconds per step of both (median over the rounds, by the slowest rank's clock), their ratio
`gloo_to_shared` (above 1, shared memory is faster) and that of each round, peak memory of the largest rank,
and start-up: seconds from starting the processes until the first step is done.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import Shape
from benchmarks.teams import Contender, Team, started, take_turns, write

LARGE = Shape(micro_batch=2)
SMALL = Shape(layers=4, hidden=256, heads=4, sequence=256, vocab=4096, micro_batch=2)
BACKENDS = {"shared": "auto", "gloo": "gloo"}


@dataclass(frozen=True)
class Line:
    """One comparison.

    Attributes:
        ranks, tp, pp: the layout; data parallelism takes what they leave.
        zero: the ZeRO stage.
        dtype: bf16 or fp32.
        quick: whether `--quick` includes it.
    """

    ranks: int
    tp: int = 1
    pp: int = 1
    zero: int = 0
    dtype: str = "bf16"
    quick: bool = False

    @property
    def name(self) -> str:
        """What `--only` matches."""
        dp = self.ranks // (self.tp * self.pp)
        sizes = [f"{axis}={size}" for axis, size in (("P", self.pp), ("T", self.tp), ("D", dp)) if size > 1]
        return f"{' '.join(sizes)} stage {self.zero} {self.dtype}"

    def shape(self, quick: bool) -> Shape:
        """The model and the batch; a pipeline gets enough micro-batches to fill it."""
        shape = replace(SMALL if quick or self.ranks > 2 else LARGE, dtype=self.dtype)
        return shape if self.pp == 1 else replace(shape, micro_batch=1, accumulations=4)

    def contenders(self) -> list[Contender]:
        """The same training over both."""
        return [
            Contender(
                name,
                "ours",
                "build",
                (self.ranks,),
                model_ranks=self.tp * self.pp,
                options={
                    "tp": self.tp,
                    "pp": self.pp,
                    "zero": {"stage": self.zero},
                    "parallel": {"distributed_backend": backend},
                },
            )
            for name, backend in BACKENDS.items()
        ]


LINES = (
    *(
        Line(2, zero=stage, dtype=dtype, quick=(dtype, stage) == ("bf16", 2))
        for dtype in ("bf16", "fp32")
        for stage in range(4)
    ),
    *(Line(2, tp=2, dtype=dtype, quick=dtype == "bf16") for dtype in ("bf16", "fp32")),
    *(Line(2, pp=2, dtype=dtype, quick=dtype == "fp32") for dtype in ("bf16", "fp32")),
    Line(4, zero=2),
    Line(4, tp=2, quick=True),
    Line(4, tp=2, pp=2),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", metavar="REGEX", default="", help="only lines whose name it matches")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--steps", type=int, help="steps per turn (default: 1, or 5 of the small model)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads in all, shared by the ranks"
    )
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file too")
    return parser.parse_args()


def result(line: Line, teams: Sequence[Team], steps: int) -> dict:
    """The JSON object of a comparison."""
    seconds = {t.name: [t.tokens_per_step / r.tokens_per_second for r in t.rounds] for t in teams}
    medians = {name: statistics.median(rounds) for name, rounds in seconds.items()}
    ratios = [g / s for g, s in zip(seconds["gloo"], seconds["shared"], strict=True)]
    return {
        "benchmark": "shared_memory",
        "layout": line.name,
        "ranks": line.ranks,
        "gloo_to_shared": round(medians["gloo"] / medians["shared"], 3),
        "gloo_to_shared_rounds": [round(ratio, 3) for ratio in ratios],
        "seconds_per_step": {name: round(median, 4) for name, median in medians.items()},
        "peak_mib_per_rank": {t.name: round(max(r.peak for r in t.rounds) / 2**20) for t in teams},
        "startup_seconds": {t.name: round(t.startup, 2) for t in teams},
        "steps": steps,
        "loss": {t.name: round(t.rounds[-1].loss, 4) for t in teams},
        "machine": f"{platform.machine()} {os.cpu_count()} cpus",
    }


def main() -> int:
    args = arguments()
    chosen = [line for line in LINES if re.search(args.only, line.name) and (line.quick or not args.quick)]
    if not chosen:
        print(f"error: `--only` must match a line, but {args.only!r} matches none", file=sys.stderr)
        return 2
    status = 0
    for line in chosen:
        shape = line.shape(args.quick)
        steps = args.steps or (1 if shape.hidden == LARGE.hidden else 5)
        with started(line.contenders(), shape, line.ranks, max(1, args.threads // line.ranks)) as found:
            teams, failed = found
            if failed:
                status = 1
                continue
            take_turns(teams, shape, args.rounds, steps)
            write([result(line, teams, args.rounds * steps)], args.output)
    return status


if __name__ == "__main__":
    sys.exit(main())
