"""The layout that `megazero tune` chooses on this machine, beside the best of all layouts that are trained.

    python benchmarks/tune_choices.py --device PROFILE.json [--rounds 2] [--finals 5] [--output FILE.json]

PROFILE.json is what `megazero profile --nproc 2` wrote. For each of six models every layout of two ranks that
the rules allow is planned, in two processes at once, and trained for a few steps, the layouts in turns. The
quickest of so many is partly the luckiest, so the quickest few and the first few by plan are trained in more
rounds, and these decide.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megazero.config.resolve import parse_config
from megazero.plan.device import Device
from megazero.plan.layout import Layout
from megazero.plan.measured import measured_steps
from megazero.plan.tuning import Planned, Search, Space

COMMON = "--vocab-size 4096 --mock-data --micro-batch-size 1 --lr 1e-4 --train-iters 100 --device cpu "
SHAPES = {
    "4 layers of 256": "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--global-batch-size 8",
    "8 layers of 128": "--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
    "--global-batch-size 8",
    "2 layers of 512": "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 128 "
    "--global-batch-size 4",
    "4 layers of 384, short batch": "--num-layers 4 --hidden-size 384 --num-attention-heads 6 "
    "--seq-length 128 --global-batch-size 2",
    "4 layers of 128, long samples": "--num-layers 4 --hidden-size 128 --num-attention-heads 4 "
    "--seq-length 512 --global-batch-size 4",
    "4 experts, 4 layers of 128": "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
    "--global-batch-size 8 --num-experts 4",
}
_FINALISTS = 3
SPACE = Space(micro_batches=(1, 2, 4), recomputes=("none",))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--finals", type=int, default=5, help="rounds that decide")
    parser.add_argument("--output", type=Path)
    flags = parser.parse_args()
    rows = []
    heads = f"{'model':<31}{'layouts':>8}{'chosen':>10}{'best':>9}{'slower by':>11}{'of three':>10}"
    print(f"{heads}  chosen; best", flush=True)
    for name, words in SHAPES.items():
        given = parse_config((COMMON + words).split(), world_size=2).config
        search = Search(given, 2, Device.load(str(flags.device)), 2, SPACE)
        layouts = [layout for _, layout in search.ordered() if not search.refused(layout)]
        with multiprocessing.get_context("spawn").Pool(2, torch.set_num_threads, (1,)) as pool:
            plans = pool.map(partial(Planned.of, search), layouts, chunksize=1)
        real = measured_steps([search.config(x) for x in layouts], 2, "cpu", flags.rounds)
        measured: dict[Layout, float] = {x: own.seconds for x, own in zip(layouts, real, strict=True)}
        first = [plan.layout for plan in sorted(plans, key=lambda plan: plan.seconds)][:_FINALISTS]
        quick = sorted(layouts, key=lambda layout: measured[layout])[:_FINALISTS]
        finalists = list(dict.fromkeys((*first, *quick)))
        real = measured_steps([search.config(x) for x in finalists], 2, "cpu", flags.finals)
        finals = {x: own.seconds for x, own in zip(finalists, real, strict=True)}
        chosen, quickest = first[0], min(finals, key=lambda layout: finals[layout])
        behind = finals[chosen] / finals[quickest] - 1
        of_three = min(finals[layout] for layout in first) / finals[quickest] - 1
        print(
            f"{name:<31}{len(layouts):>8}{finals[chosen] * 1e3:>7.0f} ms{finals[quickest] * 1e3:>6.0f} ms"
            f"{behind:>+11.1%}{of_three:>+10.1%}  {chosen}; {quickest}",
            flush=True,
        )
        all_of_it = [
            {
                "layout": str(plan.layout),
                "planned": plan.seconds,
                "measured": measured[plan.layout],
                "finals": finals.get(plan.layout),
            }
            for plan in plans
        ]
        rows.append({"model": name, "behind": behind, "best_of_three_behind": of_three, "layouts": all_of_it})
    if flags.output is not None:
        flags.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
