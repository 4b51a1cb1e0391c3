"""Time of bringing tokens to their experts and back on one rank, against copying as many bytes, interleaved.

    python benchmarks/permutation.py --threads 1 2
    python benchmarks/permutation.py --tokens 4096 --width 1024

Unless told otherwise 2,048 tokens of width 512; 8 experts, 2 of them for each token, as in moe_layer.py. A
step must read and write so many rows of that width, n for the tokens and m = 2 n for the choices:

    permute           read and write m
    its backward      read m, write n: sums over a token's choices
    combine           read m, write n: weighted sums
    its backward      read m and n, write m; the weights' gradients are m inner products

One JSON line per step, dtype and thread count gives the median over the rounds of the ratio of its time to
that of a copy of as many bytes (1 is the speed of a copy), and the same of the processor's time, which tells
more where other jobs share the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.moe.dispatch import SortedRows, combine, permute
from megazero.mpu.malloc import keep_freed_memory

EXPERTS, TOPK = 8, 2
REPEATS = 10  # per round, of which the median counts


def steps(dtype: torch.dtype, tokens: int, width: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Name -> the step, and how many rows a copy of as many bytes has."""
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    chosen = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOPK]
    rows = SortedRows.sort(chosen, None, EXPERTS)
    choices = tokens * TOPK
    x, sorted_rows = random(tokens, width), random(choices, width)
    weights = torch.rand(tokens, TOPK, generator=generator)
    leaves = (
        x.clone().requires_grad_(),
        sorted_rows.clone().requires_grad_(),
        weights.clone().requires_grad_(),
    )
    there, back = permute(leaves[0], rows), combine(leaves[1], leaves[2], rows)
    grads = random(choices, width), random(tokens, width)
    half = (choices + tokens) / 2
    return {
        "permute": (lambda: permute(x, rows), choices),
        "permute backward": (
            lambda: torch.autograd.grad(there, leaves[0], grads[0], retain_graph=True),
            half,
        ),
        "combine": (lambda: combine(sorted_rows, weights, rows), half),
        "combine backward": (
            lambda: torch.autograd.grad(back, leaves[1:], grads[1], retain_graph=True),
            choices + tokens / 2,
        ),
    }


def ratios(work: Callable[[], object], copy: Callable[[], object]) -> tuple[float, float]:
    """The time of `work` per time of `copy`, by the clock and by the processor: medians of calls in turns."""
    found: tuple[list, list] = [], []
    for _ in range(REPEATS):
        for each, times in zip((work, copy), found, strict=True):
            began = time.perf_counter(), time.process_time()
            each()
            times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    medians = ([statistics.median(clock) for clock in zip(*times, strict=True)] for times in found)
    (clock, processor), (copy_clock, copy_processor) = medians
    return clock / copy_clock, processor / copy_processor


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    keep_freed_memory()  # as a training does
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            plain = torch.randn(args.tokens * (TOPK + 1), args.width).to(dtype)
            rounds: dict[str, list[tuple[float, float]]] = {}
            for _ in range(args.rounds):
                for name, (work, rows) in steps(dtype, args.tokens, args.width).items():
                    rounds.setdefault(name, []).append(ratios(work, plain[: round(rows)].clone))
            for name, found in rounds.items():
                line: dict[str, object] = {"step": name, "dtype": str(dtype).removeprefix("torch.")}
                line |= {"threads": threads, "tokens": args.tokens, "width": args.width}
                for clock, each in zip(("ratio", "processor_ratio"), zip(*found, strict=True), strict=True):
                    line[clock] = round(statistics.median(each), 3)
                    line[f"{clock}_range"] = round(min(each), 3), round(max(each), 3)
                print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
