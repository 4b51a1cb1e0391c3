"""Law 1 of post-training: chats and preferences train alike on every layout.

    python proofs/post_training_layouts.py [--only TEXT] [--every N]

Each layout trains three steps as threads, and is compared with one process: losses and gradient norms of each
step, and all weights at the end. Preferences are scored by each layout anew.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.checkpoint.part import WEIGHT, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.errors import ConfigError
from tests.post_training.samples import make_files, run

TOLERANCE = 2e-5
KEYS = ("lm_loss", "preference_loss", "sft_loss", "rewards_margins", "grad_norm")
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.02"
)
MODELS = {"dense": "", "experts": EXPERTS, "learned": "--position-embedding-type learned_absolute"}
TASKS = {
    "chat": "",
    "preference": "--preference-sft-coeff 0.2",
    "preference-ipo": "--preference-loss ipo",
    "preference-orpo": "--preference-loss orpo",
}


def layouts() -> list[tuple[str, str, int]]:
    """Model, flags and ranks of each layout: all sizes of up to four ranks twice, and some of eight."""
    found = []
    stages = itertools.cycle((0, 1, 2, 3))
    schedules = itertools.cycle(("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"))
    every = itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4))
    sizes = [size for size in every if 1 < math.prod(size) <= 4]
    for tp, pp, cp, dp in [*sizes, *sizes, (2, 2, 2, 1), (2, 2, 1, 2), (1, 2, 2, 2)]:
        for model in MODELS:
            flags = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
            flags += f" --context-parallel-size {cp} --zero-stage {next(stages)}"
            flags += " --sequence-parallel" if tp > 1 and (model == "experts" or dp > 1) else ""
            if pp > 1:
                kind = next(schedules)
                kind = "1f1b" if pp == 4 and kind in ("interleaved", "zb-v") else kind
                flags += f" --pipeline-schedule {kind}"
                flags += " --num-layers-per-virtual-pipeline-stage 1" if kind == "interleaved" else ""
            if model == "experts":
                flags += f" --expert-model-parallel-size {max(s for s in (1, 2, 4) if tp * cp * dp % s == 0)}"
                flags += " --expert-tensor-parallel-size 1" if tp > 1 else ""
            flags += " --micro-batch-size 2" if dp == 1 and model != "learned" else ""
            found.append((model, flags, tp * pp * cp * dp))
    return found


def trained(folder: Path, task: str, flags: str, ranks: int) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """The records of three steps, and the weights after them."""
    for old in folder.glob("*.reference-*.npz"):
        old.unlink()
    with tempfile.TemporaryDirectory() as save, contextlib.redirect_stdout(io.StringIO()):
        more = ("--epochs", 1, "--save", save, "--no-save-optim", "--metrics-jsonl", Path(save) / "m.jsonl")
        steps, _ = run(
            folder, task.partition("-")[0], *TASKS[task].split(), *flags.split(), *more, ranks=ranks
        )
        (place,) = Path(save).glob("iter_*")
        reader = CheckpointReader(place)
        parts = [
            Part.whole(key, torch.empty(shape)) for key, shape in reader.shapes.items() if key.kind == WEIGHT
        ]
        reader.read(parts)
    return steps, {str(part.key): part.tensor for part in parts}


def deviation(ours: tuple, theirs: tuple) -> tuple[float, str]:
    """The largest relative difference, and where it is."""
    worst = (0.0, "")
    for a, b in zip(ours[0], theirs[0], strict=True):
        for key in KEYS:
            if key in b:
                # Margins are differences of sums that cancel in the first step.
                gap = abs(a[key] - b[key]) / max(abs(b[key]), 1.0 if "margins" in key else 1e-3)
                worst = max(worst, (gap, f"{key} of step {b['iteration']}"))
    assert ours[1].keys() == theirs[1].keys()
    for name, weight in theirs[1].items():
        gap = float((ours[1][name] - weight).norm() / weight.norm().clamp(min=1e-6))
        worst = max(worst, (gap, name))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="layouts whose line has this text")
    parser.add_argument("--every", type=int, default=1, help="each N-th layout alone")
    args = parser.parse_args()
    bad, count, refused, tasks = 0, 0, 0, itertools.cycle(TASKS)
    with tempfile.TemporaryDirectory() as place:
        folder, alone = make_files(Path(place)), {}
        for model, flags, ranks in layouts()[:: args.every]:
            for task in (next(tasks),):
                line = f"{task} {model} {flags}"
                if args.only not in line:
                    continue
                began = time.perf_counter()
                try:
                    ours = trained(folder, task, f"{MODELS[model]} {flags}", ranks)
                except ConfigError as error:
                    refused += 1
                    print(f"refused {line}: {str(error)[:200]}", flush=True)
                    continue
                if (task, model) not in alone:
                    alone[task, model] = trained(folder, task, MODELS[model], 1)
                worst, where = deviation(ours, alone[task, model])
                count, bad = count + 1, bad + (worst > TOLERANCE)
                verdict = "ok" if worst <= TOLERANCE else "BAD"
                print(
                    f"{verdict} {worst:.1e} ({where}) {line} [{time.perf_counter() - began:.1f} s]",
                    flush=True,
                )
    print(
        f"{count} trainings, {bad} deviate by more than {TOLERANCE}; {refused} layouts are refused by rules"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
