"""Speed of one layer of experts, forward and backward, against other implementations, interleaved in one run.

    python benchmarks/moe_layer.py                  # one process, dropless
    python benchmarks/moe_layer.py --capacity 1.25
    python benchmarks/moe_layer.py --ranks 2

8 SwiGLU experts of width 1024 on hidden states of 512; each token takes 2. `dense` is an MLP with the
FLOPs of a token's experts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders.moe import LayerShape
from benchmarks.teams import Contender, add_arguments, present, results, started, take_turns, write

CONTENDERS = (
    Contender("dense", "moe.dense", "build", (1, 2)),
    Contender("transformers", "moe.transformers_", "build", (1, 2), "transformers"),
    Contender("megatron-core", "moe.megatron", "build", (1, 2), "megatron.core"),
    Contender("deepspeed", "moe.deepspeed_", "build", (1, 2), "deepspeed"),
    Contender("megazero", "moe.ours", "build", (1, 2)),
    Contender("megazero-allgather", "moe.ours", "build", (2,), options={"dispatcher": "allgather"}),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, [c.name for c in CONTENDERS])
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--capacity", type=float, help="capacity factor; default: nothing is dropped")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.set_defaults(dtype="fp32")
    args = parser.parse_args()
    keys = ("dtype", "device", "capacity", "experts", "topk", "width")
    settings = {key: getattr(args, key) for key in keys}
    shape = LayerShape(**settings)
    chosen = [c for c in CONTENDERS if c.name in (args.contenders or [c.name]) and args.ranks in c.ranks]
    settings |= {"ranks": args.ranks, "threads": args.threads}
    with started(present(chosen), shape, args.ranks, max(1, args.threads // args.ranks)) as (teams, _):
        take_turns(teams, shape, args.rounds, args.steps)
        write(results(teams, "moe_layer", settings, chosen[0].name, step_peak=True), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
