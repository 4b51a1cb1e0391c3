"""How much of a ring's sends hides behind its products, on a slow link.

    python benchmarks/ring_overlap.py --ranks 2 --tokens 16384 --gigabytes-per-second 1

Ranks are processes over Gloo. A message comes no sooner than its bytes take on a link of that rate, which it
has to itself after those before it. Forward and backward of causal attention take turns with such a link and
without one; `hidden` is the share of the link's time that the pass is not longer by, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.multiprocessing import spawn

from megazero.deepspeed.comm.groups import logged_group
from megazero.layers.context.masks import PairMasks
from megazero.layers.context.ring import Ring, ring_attention
from megazero.layers.inputs import Attends
from megazero.mpu.group import Group, Transfer, Work
from megazero.mpu.malloc import keep_freed_memory
from megazero.mpu.torch_group import join_file_world, leave_world
from megazero.mpu.wrapping_group import WrappingGroup


class _Late(Work):
    """A message that is here when it has come, and not before its time."""

    def __init__(self, work: Work, due: float):
        self.work, self.due = work, due

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))


class SlowLink(WrappingGroup):
    """A rank receives over one link of `rate` bytes a second, in order; `busy` adds up its seconds."""

    def __init__(self, inner: Group, rate: float):
        super().__init__(inner)
        self.rate, self.free, self.busy = rate, 0.0, 0.0

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        works, late = self.inner.exchange(transfers), []
        for transfer, work in zip(transfers, works, strict=True):
            if transfer.kind == "send":
                late.append(work)
                continue
            seconds = transfer.tensor.numel() * transfer.tensor.element_size() / self.rate
            self.free = max(self.free, time.perf_counter()) + seconds
            self.busy += seconds
            late.append(_Late(work, self.free))
        return late


def measure(rank: int, store: str, args: argparse.Namespace) -> None:
    """One rank; the first one prints."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    keep_freed_memory()
    join_file_world(store, rank, args.ranks, timedelta(minutes=10))
    fast = logged_group(None)
    slow = SlowLink(fast, args.gigabytes_per_second * 1e9)
    counts = (args.heads, args.kv_heads, args.kv_heads)
    parts = [
        torch.randn(args.tokens // args.ranks, 1, count, args.width, requires_grad=True) for count in counts
    ]
    masks = PairMasks(Attends(0, causal=True), args.width**-0.5)
    times: dict[str, list[float]] = {"fast": [], "slow": []}
    for turn in range(args.rounds + 1):
        for name, group in (("fast", fast), ("slow", slow)):
            fast.barrier()
            start = time.perf_counter()
            out, _ = ring_attention(*parts, Ring(group, args.tokens, True, masks))
            out.backward(torch.ones_like(out))
            fast.barrier()
            if turn:
                times[name].append(time.perf_counter() - start)
    link = torch.tensor([slow.busy / (args.rounds + 1)], dtype=torch.float64)
    fast.all_reduce(link, "max").wait()
    if rank == 0:
        medians = {name: round(statistics.median(values), 4) for name, values in times.items()}
        extra = statistics.median(s - f for f, s in zip(times["fast"], times["slow"], strict=True))
        hidden = 1 - max(0.0, extra) / link.item()
        line = {"ranks": args.ranks, "tokens": args.tokens, "load": os.getloadavg()[0], "seconds": medians}
        print(json.dumps(line | {"link_seconds": round(link.item(), 4), "hidden": round(hidden, 3)}))
    leave_world()


def main() -> int:
    """Time and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384, help="of a whole sequence")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--gigabytes-per-second", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        spawn(measure, args=(f"{folder}/store", args), nprocs=args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
