"""Collectives between ranks of this host: shared memory against Gloo.

    python benchmarks/collectives.py --ranks 2 --rounds 15 --mib 0.0625 1 16 64

Both groups live in the same processes of one thread each and take turns, so that drift of the machine hits
both. One JSON line per operation, dtype and size: median milliseconds of the slower rank, gigabytes per
second of the tensor that the operation is about, and the median of the rounds' time ratios (above 1: shared
memory is faster). `overlap` lines are an all-reduce and a matrix product, one after or during the other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TIMEOUT = timedelta(seconds=120)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=float, nargs="+", default=[1 / 16, 1, 16, 64])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    names = [*OPERATIONS, "overlap"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    return parser.parse_args()


def actions(group, elements: int, dtype) -> dict[str, Callable[[], None]]:
    """What is timed, by name, on tensors whose larger side has `elements`."""
    import torch

    whole = torch.full((elements,), 0.0, dtype=dtype)  # stays what it is, however often it is summed
    other = torch.empty_like(whole)
    part = torch.ones(elements // group.size, dtype=dtype)

    return {
        "all_reduce": lambda: group.all_reduce(whole).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(part, whole).wait(),
        "all_gather": lambda: group.all_gather(whole, part).wait(),
        "broadcast": lambda: group.broadcast(whole, 0).wait(),
        "all_to_all": lambda: group.all_to_all(other, whole).wait(),
    }


def overlap_actions(group, elements: int, dtype) -> dict[str, Callable[[], None]]:
    """A matrix product of some milliseconds, with an all-reduce before it or under way."""
    import torch

    whole = torch.full((elements,), 0.0, dtype=dtype)  # stays what it is, however often it is summed
    factor = torch.ones(768, 768)

    def after() -> None:
        group.all_reduce(whole).wait()
        factor @ factor

    def meanwhile() -> None:
        work = group.all_reduce(whole, async_op=True)
        factor @ factor
        work.wait()

    return {"after": after, "meanwhile": meanwhile}


def seconds(group, action: Callable[[], None]) -> float:
    group.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(groups: dict, kind: Callable, elements: int, dtype, rounds: int) -> dict[str, dict[str, list]]:
    """Seconds of each round, by action and group."""
    tables = {name: kind(group, elements, dtype) for name, group in groups.items()}
    found = {action: {name: [] for name in groups} for action in tables["gloo"]}
    for action, times in found.items():
        for _ in range(rounds + 1):
            for name, group in groups.items():
                times[name].append(seconds(group, tables[name][action]))
        for name in groups:
            del times[name][0]  # to warm up
    return found


def serve(connection, args: argparse.Namespace, rank: int, store: str) -> None:
    """One rank: measures everything and sends [(dtype, mib, seconds by action and group)]."""
    import torch
    import torch.distributed as dist

    from megazero.mpu.shared_open import open_shared
    from megazero.mpu.torch_group import open_group, start_world

    torch.set_num_threads(1)
    start_world("gloo", rank, args.ranks, TIMEOUT, store=dist.FileStore(store, args.ranks))
    gloo = open_group("world", rank, tuple(range(args.ranks)), TIMEOUT)
    shared = open_shared(gloo, TIMEOUT)
    if shared is gloo:
        connection.send(None)
        return
    groups = {"gloo": gloo, "shared": shared}
    results = []
    for name in args.dtypes:
        dtype = getattr(torch, name)
        for mib in args.mib:
            elements = int(mib * 2**20) // dtype.itemsize // args.ranks * args.ranks
            found = {}
            if set(args.only) - {"overlap"}:
                found = measure(groups, actions, elements, dtype, args.rounds)
                found = {each: times for each, times in found.items() if each in args.only}
            if "overlap" in args.only:
                together = measure(groups, overlap_actions, elements, dtype, args.rounds)
                found |= {f"overlap {each}": times for each, times in together.items()}
            results.append((name, mib, found))
    connection.send(results)
    shared.close()


def gather(args: argparse.Namespace) -> list:
    """The results of every rank."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        for rank in range(args.ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(there, args, rank, str(Path(folder) / "store")), daemon=True
            )
            process.start()
            there.close()
            processes.append(process)
            ends.append(here)
        answers = [end.recv() for end in ends]
        for process in processes:
            process.join()
    if None in answers:
        sys.exit("shared memory cannot be used here; the warning above says why")
    return answers


def report(args: argparse.Namespace, answers: list) -> None:
    for case, (dtype, mib, found) in enumerate(answers[0]):
        for action in found:
            # The slower rank of each round: an operation is done when all have it.
            times = {}
            for name in ("gloo", "shared"):
                by_rank = [answer[case][2][action][name] for answer in answers]
                times[name] = [max(each) for each in zip(*by_rank, strict=True)]
            medians = {name: statistics.median(values) for name, values in times.items()}
            speeds = {name: mib * 2**20 / 1e9 / value for name, value in medians.items()}
            ratios = [a / b for a, b in zip(times["gloo"], times["shared"], strict=True)]
            line = {
                "benchmark": "collectives",
                "operation": action,
                "dtype": dtype,
                "mib": mib,
                "ranks": args.ranks,
                **{f"{name}_ms": round(1e3 * value, 3) for name, value in medians.items()},
                **{f"{name}_gb_per_s": round(value, 2) for name, value in speeds.items()},
                "ratio": round(statistics.median(ratios), 2),
            }
            print(json.dumps(line), flush=True)


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # for the ranks
    args = arguments()
    report(args, gather(args))


if __name__ == "__main__":
    main()
