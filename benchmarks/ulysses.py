"""Attention over sequences that two ranks share: here, and by DeepSpeed's own DistributedAttention.

    PYTHONPATH=FOLDER python benchmarks/ulysses.py --tokens 4096 16384

FOLDER holds the package `deepspeed` (``pip install --target FOLDER --no-deps deepspeed==0.19.8`` and what it
imports); without it, the ways here are compared with each other. Forward and backward, causal, on two
processes with Gloo. ``layer`` is `DistributedAttention` here and ``core`` the exchange of
`layers.context.heads`, both around torch's scaled_dot_product_attention, as DeepSpeed's; ``kernel`` is the
core's exchange around the core's attention; ``ring`` sends keys and values to the rank that sees them.
(torch's `context_parallel` has no kernels for a CPU.) ``--exchange-only`` puts a sum of queries, keys and
values in the place of attention. All take turns in one run; medians, and how much longer DeepSpeed's takes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.multiprocessing import spawn
from torch.nn.functional import scaled_dot_product_attention

from megazero.deepspeed.comm.groups import logged_group
from megazero.deepspeed.sequence.layer import DistributedAttention
from megazero.layers.context.heads import HeadPlan, exchange_heads, return_heads
from megazero.layers.context.masks import PairMasks
from megazero.layers.context.ring import Ring, ring_attention
from megazero.layers.inputs import Attends
from megazero.mpu.malloc import keep_freed_memory
from megazero.mpu.torch_group import join_file_world, leave_world
from megazero.ops.attention import attention

RANKS = 2
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[s, b, n, d], causal, by torch."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    repeated = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=repeated).permute(2, 0, 1, 3)


def core_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[s, b, n, d], causal, by the core."""
    return attention(q, k, v, causal=True).unflatten(2, (q.shape[2], -1))


def ways(rank: int, heads: int, kv_heads: int, exchange_only: bool) -> dict[str, Way]:
    """Name -> from this rank's queries, keys and values to its context, [s/p, b, n, d]."""

    def add(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + (k + v).repeat_interleave(q.shape[2] // k.shape[2], 2)

    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        masks = PairMasks(Attends(0, causal=True), q.shape[-1] ** -0.5)
        return ring_attention(q, k, v, Ring(group, RANKS * len(q), True, masks))[0]

    by_torch, by_core = (add, add) if exchange_only else (torch_attention, core_attention)
    group, plan = logged_group(None), HeadPlan(heads, kv_heads, RANKS, rank)

    def core(local: Way) -> Way:
        def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            context = local(*exchange_heads(q, k, v, plan, group))
            return return_heads(context.flatten(2), plan, group).unflatten(2, (heads, -1))

        return way

    layer = DistributedAttention(by_torch, None)
    given: dict[str, Way] = {"layer": layer, "core": core(by_torch)}
    if not exchange_only:
        given["kernel"] = core(by_core)
        given["ring"] = around
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed import comm
        from deepspeed.sequence.layer import DistributedAttention as Theirs

        comm.init_distributed("gloo")
        theirs = Theirs(by_torch, comm.new_group(list(range(RANKS))))
        given["deepspeed"] = lambda q, k, v: theirs(q, k, v, 1)
    return given


def measure(rank: int, store: str, args: argparse.Namespace) -> None:
    """One rank; the first one prints."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    keep_freed_memory()  # as an engine does; it is DeepSpeed's gain as well
    join_file_world(store, rank, RANKS, timedelta(minutes=10))
    contenders = ways(rank, args.heads, args.kv_heads, args.exchange_only)
    for tokens in args.tokens:
        shapes = [(tokens // RANKS, 1, count, args.width) for count in (args.heads, *[args.kv_heads] * 2)]
        parts = [torch.randn(shape, requires_grad=True) for shape in shapes]
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(args.rounds + 1):
            for name, way in contenders.items():
                seconds = timed(way, parts)
                if turn:  # the first is a warm-up
                    times[name].append(seconds)
        if rank == 0:
            report(tokens, times, args)
    leave_world()


def timed(way: Way, parts: list[Tensor]) -> float:
    """The seconds of a forward and backward pass."""
    for part in parts:
        part.grad = None
    logged_group(None).barrier()
    start = time.perf_counter()
    result = way(*parts)
    result.backward(torch.ones_like(result))
    logged_group(None).barrier()
    return time.perf_counter() - start


def report(tokens: int, times: dict[str, list[float]], args: argparse.Namespace) -> None:
    """Print one line of JSON for a length."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    line = {"tokens": tokens, "heads": [args.heads, args.kv_heads], "exchange_only": args.exchange_only}
    line |= {
        "load": os.getloadavg()[0],
        "seconds": {name: round(value, 4) for name, value in medians.items()},
    }
    if "deepspeed" in medians:
        theirs = medians["deepspeed"]
        line["ratio"] = {name: round(theirs / value, 3) for name, value in medians.items()}
    print(json.dumps(line), flush=True)


def main() -> int:
    """Time and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="of a whole sequence")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--exchange-only", action="store_true")
    with TemporaryDirectory() as folder:
        spawn(measure, args=(f"{folder}/store", parser.parse_args()), nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
