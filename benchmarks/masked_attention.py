"""Attention under a window and under a block layout on the CPU: does it cost what may be seen, and no more?

    OMP_NUM_THREADS=1 python benchmarks/masked_attention.py window
    OMP_NUM_THREADS=1 python benchmarks/masked_attention.py blocks --block 64 --density 0.05

`window`: time per token, forward and backward, of causal attention within `--window` keys, at lengths from 4k
to 64k; `flatness` is each length's time per token divided by that of the shortest, and `flatness by pair` the
same of the time per visible pair, since the first tokens of a sequence see less than a window. `blocks`: time
of dense attention without causality divided by that of attention under a random block layout of the given
density (its diagonal included), forward and backward; `computed` is the share of the pairs it keeps. The
contenders of a line take turns in each round, times are medians over rounds of the processor time of the
process, and the ratios are medians of the rounds' ratios. One JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

from megazero.ops.attention import ALL, BlockLayout, Pattern, attention

LENGTHS = (4096, 8192, 16384, 32768, 65536)


def step_of(length: int, heads: int, pattern: Pattern, dtype: torch.dtype) -> Callable[[], None]:
    """Forward and backward of one sample with heads of 64."""
    q, k, v = (torch.randn(length, 1, heads, 64, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(length, 1, heads * 64, dtype=dtype)

    def step() -> None:
        attention(q, k, v, causal=False, pattern=pattern).backward(grad)

    return step


def in_turn(steps: list[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Processor seconds of each step in each round."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for own, step in zip(times, steps, strict=True):
            begin = time.process_time()
            step()
            own.append(time.process_time() - begin)
    return times


def random_layout(length: int, block: int, heads: int, density: float) -> BlockLayout:
    count = length // block
    blocks = torch.rand(heads, count, count, generator=torch.Generator().manual_seed(1)) < density
    return BlockLayout(blocks | torch.eye(count, dtype=torch.bool), block)


def window(args: argparse.Namespace, dtype: torch.dtype) -> None:
    pattern = Pattern((args.window - 1, 0), sinks=args.sinks)
    steps = [step_of(length, args.heads, pattern, dtype) for length in LENGTHS]
    times = in_turn(steps, args.rounds)

    def seen(length: int) -> float:
        """Keys that a token sees on average, sinks aside."""
        return args.window * (1 - (args.window - 1) / (2 * length))

    for length, own in zip(LENGTHS, times, strict=True):
        ratios = [one / first * LENGTHS[0] / length for one, first in zip(own, times[0], strict=True)]
        line = {
            "length": length,
            "microseconds per token": round(statistics.median(own) / length * 1e6, 2),
            "flatness": round(statistics.median(ratios), 3),
            "flatness by pair": round(statistics.median(ratios) / seen(length) * seen(LENGTHS[0]), 3),
        }
        print(json.dumps({**line, "load": os.getloadavg()[0]}), flush=True)


def blocks(args: argparse.Namespace, dtype: torch.dtype) -> None:
    layout = random_layout(args.length, args.block, args.heads, args.density)
    sparse = step_of(args.length, args.heads, Pattern(layout=layout), dtype)
    dense = step_of(args.length, args.heads, ALL, dtype)
    of_sparse, of_dense = in_turn([sparse, dense], args.rounds)
    line = {
        "length": args.length,
        "block": args.block,
        "computed": round(layout.blocks.float().mean().item(), 4),
        "dense seconds": round(statistics.median(of_dense), 3),
        "sparse seconds": round(statistics.median(of_sparse), 3),
        "ratio": round(statistics.median(x / y for x, y in zip(of_dense, of_sparse, strict=True)), 2),
    }
    print(json.dumps({**line, "load": os.getloadavg()[0]}), flush=True)


def main() -> None:
    """Measure one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=("window", "blocks"))
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--sinks", type=int, default=0)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--density", type=float, default=0.05)
    args = parser.parse_args()
    measure = window if args.kind == "window" else blocks
    measure(args, torch.bfloat16 if args.bf16 else torch.float32)


if __name__ == "__main__":
    main()
