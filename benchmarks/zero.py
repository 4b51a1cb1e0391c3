"""ZeRO stages against their peers on the same 23M-parameter GPT, two ranks of one thread each by default.

    python benchmarks/zero.py --group 2 --dtype bf16        # a stage, or `tp`: two tensor-parallel ranks
    python benchmarks/zero.py --contenders ddp fsdp2-3 megazero-3

A group is megazero at that stage, DDP as the baseline, and the other ways to do the same. More than `--alive`
contenders disturb each other, so the peers of a large group are split over several runs, each with DDP and
megazero; `run` numbers them. One JSON line each: median tokens/s, the ratio to DDP of the median of per-round
ratios, the loss, and peak memory per rank: `peak` since the process began, `step_peak` of the measured steps.

`fsdp2-2` keeps its parameters gathered through the step and `fsdp2-3` gathers them for each use; both reduce
gradients with every micro-batch, or with `-once` only after the last. `megazero-3` keeps what it gathered
for its next use in the step, `megazero-3-freed` does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import Shape
from benchmarks.teams import Contender, add_arguments, present, results, started, take_turns, write

RANKS = (2, 4)
BASELINE = "ddp"

CONTENDERS = (
    Contender("ddp", "plain", "build_ddp", RANKS),
    Contender("zero-redundancy", "plain", "build_zero_redundancy", RANKS),
    *(
        Contender(f"deepspeed-{s}", "deepspeed_", "build", RANKS, "deepspeed", 1, {"stage": s})
        for s in range(4)
    ),
    *(
        Contender(
            f"fsdp2-{3 if reshard else 2}{'' if each else '-once'}",
            "fsdp2",
            "build",
            RANKS,
            options={"reshard": reshard, "each": each},
        )
        for reshard in (False, True)
        for each in (True, False)
    ),
    Contender("megatron-core-tp2", "megatron", "build", RANKS, "megatron.core", 2, {"tp": 2}),
    *(Contender(f"megazero-{s}", "ours", "build", RANKS, options={"zero": {"stage": s}}) for s in range(4)),
    Contender(
        "megazero-3-freed", "ours", "build", RANKS, options={"zero": {"stage": 3, "max_live_parameters": 0}}
    ),
    Contender("megazero-tp2", "ours", "build", RANKS, model_ranks=2, options={"tp": 2}),
)

# group -> (contenders in every run of the group, contenders split over its runs)
GROUPS = {
    "0": (("ddp", "megazero-0"), ("deepspeed-0",)),
    "1": (("ddp", "megazero-1"), ("zero-redundancy", "deepspeed-1")),
    "2": (("ddp", "megazero-2"), ("deepspeed-2", "fsdp2-2", "fsdp2-2-once")),
    "3": (("ddp", "megazero-3", "megazero-3-freed"), ("deepspeed-3", "fsdp2-3", "fsdp2-3-once")),
    "tp": (("ddp", "megazero-tp2"), ("megatron-core-tp2",)),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, [c.name for c in CONTENDERS])
    parser.add_argument(
        "--group", choices=GROUPS, help="contenders to compare, unless --contenders names them"
    )
    parser.add_argument("--ranks", type=int, choices=RANKS, default=2)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--alive", type=int, default=4, help="the most contenders in one run")
    args = parser.parse_args()
    if not (args.group or args.contenders):
        parser.error("`--group` or `--contenders` must be given")
    return args


def runs(args: argparse.Namespace) -> Iterator[list[Contender]]:
    """The contenders of each run."""
    by_name = {c.name: c for c in CONTENDERS}
    if args.contenders:
        yield present([by_name[name] for name in args.contenders])
        return
    always, peers = (present([by_name[name] for name in names]) for names in GROUPS[args.group])
    room = max(1, args.alive - len(always))
    for begin in range(0, max(1, len(peers)), room):
        yield [*always, *peers[begin : begin + room]]


def main() -> int:
    args = arguments()
    shape = replace(Shape(), dtype=args.dtype, micro_batch=args.micro_batch)
    settings = {"group": args.group, "dtype": args.dtype, "ranks": args.ranks, "threads": args.threads}
    failures = []
    for number, contenders in enumerate(runs(args)):
        with started(contenders, shape, args.ranks, max(1, args.threads // args.ranks)) as (teams, failed):
            take_turns(teams, shape, args.rounds, args.steps)
            run = {"run": number, **settings}
            write(results(teams, "zero", run, BASELINE, step_peak=True), args.output)
        failures += failed
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
