"""Training speed against other ways to train the same GPT (23M parameters by default), interleaved.

    python benchmarks/train_step.py --dtype bf16                 # one process, all cores' threads
    python benchmarks/train_step.py --dtype bf16 --ranks 2       # two ranks, the threads shared out
    python benchmarks/train_step.py --dtype bf16 --device cuda --shape 124M

Every contender lives in processes of its own, which train in turn, a few steps each, round after round, so
that a noisy moment hits all alike. One JSON line each: median tokens/s over the rounds, the ratio to the
baseline of the median of per-round ratios, peak memory per rank, and the share of the matmul rate that was
measured in the same processes between the rounds. Contenders whose package is missing are left out and named.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import SHAPES
from benchmarks.teams import Contender, add_arguments, present, results, started, take_turns, write

CONTENDERS = (
    Contender("eager", "plain", "build", (1,)),
    Contender("compiled", "plain", "build_compiled", (1,)),
    Contender("eager-allocator", "plain", "build_tuned", (1,)),
    Contender("ddp", "plain", "build_ddp", (2,)),
    Contender("fsdp2", "fsdp2", "build", (2,)),
    Contender("deepspeed-0", "deepspeed_", "build", (1, 2), "deepspeed", options={"stage": 0}),
    Contender("deepspeed-1", "deepspeed_", "build", (2,), "deepspeed", options={"stage": 1}),
    Contender("megatron-core", "megatron", "build", (1, 2), "megatron.core"),
    Contender("megatron-core-tp2", "megatron", "build", (2,), "megatron.core", 2, {"tp": 2}),
    Contender("megazero", "ours", "build", (1, 2)),
    Contender("megazero-compiled", "ours", "build", (1,), options={"compile": True}),
    Contender("megazero-tp2", "ours", "build", (2,), model_ranks=2, options={"tp": 2}),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, [c.name for c in CONTENDERS])
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="23M", help="by the number of parameters")
    parser.add_argument("--micro-batch", type=int, help="instead of the shape's")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    shape = replace(SHAPES[args.shape], dtype=args.dtype, device=args.device)
    if args.micro_batch is not None:
        shape = replace(shape, micro_batch=args.micro_batch)
    if args.contenders:
        by_name = {c.name: c for c in CONTENDERS}
        chosen = [by_name[name] for name in args.contenders]
    else:
        chosen = [c for c in CONTENDERS if args.ranks in c.ranks]
    settings = {key: getattr(args, key) for key in ("dtype", "ranks", "threads", "device", "shape")}
    with started(present(chosen), shape, args.ranks, max(1, args.threads // args.ranks)) as (teams, _):
        take_turns(teams, shape, args.rounds, args.steps)
        baseline = "eager" if args.ranks == 1 else "ddp"
        write(results(teams, "train_step", settings, baseline, step_peak=False), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
