"""Projection and loss: with whole logits, with their gradient over them, and by blocks of the vocabulary.

Forward and backward of one rank on CPU. The three take turns; a JSON line for each gives the median of the
rounds' time ratios to the first (above 1: slower), and the peak of memory over what the inputs take, from a
process of its own.

    python benchmarks/linear_cross_entropy.py --tokens 1024 --hidden 256 --vocab 32768 --rounds 7
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.mpu.solo_group import SoloGroup
from megazero.ops.cross_entropy import VocabularySlice, vocab_parallel_cross_entropy
from megazero.ops.linear_cross_entropy import linear_cross_entropy


def _all_of(weight: Tensor) -> VocabularySlice:
    return VocabularySlice(SoloGroup(), 0, len(weight))


def _whole(x: Tensor, weight: Tensor, target: Tensor, overwrite: bool = False) -> Tensor:
    logits = F.linear(x, weight)
    return vocab_parallel_cross_entropy(
        logits, target, VocabularySlice(SoloGroup(), 0, len(weight)), overwrite=overwrite
    )


WAYS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "whole": _whole,
    "overwritten": lambda *inputs: _whole(*inputs, overwrite=True),
    "blocks": lambda x, weight, target: (
        linear_cross_entropy(x, weight, target, VocabularySlice(SoloGroup(), 0, len(weight))).loss
    ),
}


def inputs_of(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    x = torch.randn(args.tokens, 1, args.hidden).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocab, args.hidden) * args.hidden**-0.5).to(dtype).requires_grad_()
    return x, weight, torch.randint(args.vocab, (args.tokens, 1))


def step(way: str, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    torch.autograd.grad(WAYS[way](*inputs).sum(), inputs[:2])


def peak_mib(way: str, args: argparse.Namespace) -> float:
    """How far the peak rises over what a call on one token and the inputs took, in MiB."""
    x, weight, target = inputs_of(args)
    small = x[:1, :, :8].detach().clone().requires_grad_(), weight[:16, :8].detach().clone().requires_grad_()
    step(way, (*small, target[:1] % 16))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(way, (x, weight, target))
    return round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peak-of", choices=WAYS, help="print the peak of one way, and no more")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak_of:
        print(peak_mib(args.peak_of, args))
        return
    # First, as a process starts with the peak of the one that it comes from.
    children = {way: [sys.executable, *sys.argv, "--peak-of", way] for way in WAYS}
    peaks = {way: float(subprocess.check_output(child, text=True)) for way, child in children.items()}
    inputs = inputs_of(args)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.rounds + 1):
        for way in WAYS:
            start = time.perf_counter()
            step(way, inputs)
            seconds[way].append(time.perf_counter() - start)
    for way in WAYS:
        ratios = [a / b for a, b in zip(seconds[way][1:], seconds["whole"][1:], strict=True)]
        line = {"way": way, "dtype": args.dtype, "time": round(statistics.median(ratios), 3)}
        print(json.dumps({**line, "peak_mib": peaks[way]}), flush=True)


if __name__ == "__main__":
    main()
