"""What a step costs through DeepSpeed's API: here, in DeepSpeed itself, and in megazero's own loop.

    python benchmarks/deepspeed_step.py --dtype fp32               # one process
    python benchmarks/deepspeed_step.py --dtype bf16 --ranks 2

The same script drives both packages on a plain GPT of 23 million parameters (``megazero-N``, ``deepspeed-N``
at ZeRO stage N). ``native`` is megazero's own loop on its own model, and ``api`` the same model through
`initialize`: their ratio is what the API costs. All train in turn (see `train_step.py`).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import Shape
from benchmarks.teams import Contender, add_arguments, present, results, started, take_turns, write

API = "deepspeed_"
CONTENDERS = {
    "native": Contender("native", "ours", "build", (1, 2)),
    "api": Contender("api", API, "build", (1, 2), options={"package": "megazero", "ours": True}),
}
for stage in range(4):
    here, there = f"megazero-{stage}", f"deepspeed-{stage}"
    options = {"package": "megazero", "stage": stage}
    CONTENDERS[here] = Contender(here, API, "build", (1, 2), options=options)
    CONTENDERS[there] = Contender(there, API, "build", (1, 2), "deepspeed", options={"stage": stage})


def main() -> int:
    """Time and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, list(CONTENDERS))
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    args = parser.parse_args()
    shape = replace(Shape(), dtype=args.dtype)
    chosen = [CONTENDERS[name] for name in args.contenders or CONTENDERS]
    settings = {key: getattr(args, key) for key in ("dtype", "ranks", "threads")}
    with started(present(chosen), shape, args.ranks, max(1, args.threads // args.ranks)) as (teams, _):
        take_turns(teams, shape, args.rounds, args.steps)
        baseline = "native" if "native" in {contender.name for contender in chosen} else chosen[0].name
        write(results(teams, "deepspeed_step", settings, baseline, step_peak=False), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
