"""Saving and loading checkpoints: megazero against safetensors, plain files, torch.distributed.checkpoint.

    python benchmarks/checkpoint.py --gigabytes 1 --ranks 1 2 --repeats 7 --folder DIR --jsonl FILE

Weights and moments of a GPT in fp32 are saved, loaded while the files are in the page cache (`load`), and
loaded again after posix_fadvise dropped their pages (`load cold`; a host below may still have them). Every
rank is a process of one thread. The contenders take turns within each round; times are those of the slowest
rank from a common barrier, and no write-back is pending when they begin. The first round is not counted:
it checks that each contender loads what it saved. When a save ends, megazero, `safetensors-durable`, `plain`
and `dcp` have fsynced; `safetensors` has not.

`stall` is how long in all a save in the background holds up its caller, beside a blocking save of the same
contender in the same round; `first` is the same for the uncounted round, which allocates. Meanwhile each rank
multiplies matrices: for `--backward-seconds`, standing for a forward and a backward, after which its tensors
may change, and then until the files are written. `slowdown` is the drop in products per second in that
forward and backward compared to right before, and `written` the time until the checkpoint was visible.
`--gigabytes 1` needs 6 GB of memory and 2 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:  # imports torch, which the processes do after OMP_NUM_THREADS is set
    from benchmarks.contenders.checkpoint_ways import Background, State, Way
    from megazero.mpu.context import ParallelContext

NAMES = ("megazero", "megazero-unhashed", "safetensors", "safetensors-durable", "plain", "dcp")
MEASURED = ("speed", "stall")
SPEEDS = ("save", "load", "load cold")
MILLISECONDS = ("blocking", "stall", "first", "written")
BASES = ("safetensors", "safetensors-durable", "plain", "dcp", "megazero-unhashed")
# Seconds of matrix products before a save in the background.
QUIET = 0.5

Times = dict[tuple[str, str], list[float]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state, over all ranks")
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument(
        "--backward-seconds", type=float, default=1.0, help="length of a step before its update (stall)"
    )
    parser.add_argument("--repeats", type=int, default=7, help="counted rounds")
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; a temporary one by default"
    )
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--measures", nargs="+", choices=MEASURED, default=list(MEASURED))
    parser.add_argument("--jsonl", type=Path, help="append one JSON line per measurement to this file")
    return parser.parse_args()


class Rank:
    """What one process measures.

    Args:
        args: the command's arguments.
        context: the ranks.
        folder: the folder that all ranks share.
        state: this rank's state.
    """

    def __init__(self, args: argparse.Namespace, context: ParallelContext, folder: Path, state: State):
        self.args = args
        self.context = context
        self.folder = folder
        self.state = state

    def speed(self) -> Times:
        """Seconds of saves and loads, by (measure, contender)."""
        from benchmarks.contenders.checkpoint_ways import WAYS

        ways = {name: self.make(name, WAYS[name]) for name in self.args.contenders}
        times: Times = {(measure, name): [] for measure in SPEEDS for name in ways}
        for counted in range(self.args.repeats + 1):
            for name, way in ways.items():
                self.clear(name)
                found = [self.seconds(way.save)]
                if not counted:
                    self.check(name, way)
                self.together(lambda name=name: self.fill_cache(name))
                found.append(self.seconds(way.load))
                self.together(lambda name=name: self.drop_cache(name))
                found.append(self.seconds(way.load))
                self.clear(name)
                if counted:
                    for measure, value in zip(SPEEDS, found, strict=True):
                        times[measure, name].append(value)
        return times

    def stall(self) -> Times:
        """Seconds of `blocking`, `first`, `stall` and `written`, and the share `slowdown`; by contender."""
        from benchmarks.contenders.checkpoint_ways import BACKGROUNDS, WAYS

        times: Times = {}
        for name in [each for each in self.args.contenders if each in BACKGROUNDS]:
            way = self.make(f"{name}-blocking", WAYS[name])
            background = self.make(f"{name}-background", BACKGROUNDS[name])
            for counted in range(self.args.repeats + 1):
                self.clear(f"{name}-background")
                self.clear(f"{name}-blocking")
                blocking = self.seconds(way.save)
                self.clear(f"{name}-blocking")
                stall, written, slowdown = self.in_background(background)
                found = {"blocking": blocking, "stall": stall, "written": written, "slowdown": slowdown}
                for measure, value in found.items() if counted else [("first", stall)]:
                    times.setdefault((measure, name), []).append(value)
            self.clear(f"{name}-background")
        return times

    def in_background(self, background: Background) -> tuple[float, float, float]:
        """One save: how long it held up its caller, when it was visible, and its slowdown."""
        alone, _ = train(lambda seconds: seconds < QUIET)
        self.context.world.barrier()
        begin = time.perf_counter()
        stall = self.seconds(background.begin)
        beside, _ = train(lambda seconds: seconds < self.args.backward_seconds)
        stall += self.seconds(background.hold)
        there: list[bool] = []
        while not there or not there[-1]:
            train(lambda seconds: background.writing())
            stall += self.seconds(lambda: there.append(background.advance()))
        written = time.perf_counter() - begin
        return stall, written, 1 - beside / alone

    def make(self, name: str, kind: Callable) -> Way | Background:
        from benchmarks.contenders.checkpoint_ways import Place

        folder = self.folder / name
        self.together(lambda: folder.mkdir(exist_ok=True))
        return kind(Place(folder, self.context), self.state)

    def together(self, action: Callable[[], None]) -> None:
        """Only the first rank does it; no rank goes on before that."""
        self.context.world.barrier()
        if self.context.rank == 0:
            action()
        self.context.world.barrier()

    def seconds(self, action: Callable[[], None]) -> float:
        self.context.world.barrier()
        begin = time.perf_counter()
        action()
        return time.perf_counter() - begin

    def clear(self, name: str) -> None:
        """Remove what a contender wrote, and let the system finish all pending writes."""

        def action() -> None:
            for path in (self.folder / name).iterdir():
                # megazero's is open for as long as its writer lives.
                if path.name != ".lock":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()

        self.together(action)

    def check(self, name: str, way: Way) -> None:
        """Load, and compare with what was saved.

        Raises:
            RuntimeError: something else came back.
        """
        import torch

        for target in self.state.targets:
            target.tensor.zero_()
        way.load()
        for part, target in zip(self.state.parts, self.state.targets, strict=True):
            if not torch.equal(part.tensor, target.tensor):
                raise RuntimeError(f"{name} loaded something other than it saved as {part.key}")

    def fill_cache(self, name: str) -> None:
        buffer = bytearray(4 << 20)
        for path in self.files_of(name):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def drop_cache(self, name: str) -> None:
        for path in self.files_of(name):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # pages still to be written would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def files_of(self, name: str) -> Iterator[Path]:
        return (path for path in (self.folder / name).rglob("*") if path.is_file())


def train(wanted: Callable[[float], bool]) -> tuple[float, int]:
    """Multiply matrices while `wanted` of the seconds so far holds: products per second, and how many."""
    import torch

    factor = torch.ones(512, 512)
    begin, products = time.perf_counter(), 0
    while wanted(time.perf_counter() - begin):
        factor @ factor
        products += 1
    return products / (time.perf_counter() - begin), products


def serve(connection: Connection, args: argparse.Namespace, place: tuple[int, int], folder: str) -> None:
    """One rank, `place` being (rank, ranks): sends its bytes and its times, or a traceback."""
    rank, ranks = place
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        import torch
        import torch.distributed as dist

        from benchmarks.contenders.checkpoint_ways import make_state
        from megazero.config.tree.parallel import ParallelConfig
        from megazero.mpu.context import solo_context
        from megazero.mpu.launch import Launch, open_context

        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder) / "store"), ranks)
        dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
        cpu = torch.device("cpu")
        context = solo_context(cpu)
        if ranks > 1:
            context = open_context(ParallelConfig(), Launch(rank, ranks, rank), cpu)
        state = make_state(args.gigabytes * 1e9, rank, ranks)
        worker = Rank(args, context, Path(folder), state)
        measures = {"speed": worker.speed, "stall": worker.stall}
        found = {name: measures[name]() for name in args.measures}
        connection.send((state.whole_bytes, found))
        connection.recv()  # the parent has all ranks' answers
        dist.destroy_process_group()
    except Exception:
        connection.send(traceback.format_exc())


def receive(end: Connection, rank: str) -> tuple[int, dict[str, Times]]:
    """What a rank measured.

    Raises:
        RuntimeError: it failed, or its process ended.
    """
    try:
        answer = end.recv()
    except EOFError as error:
        raise RuntimeError(f"the process of {rank} ended early") from error
    if isinstance(answer, str):
        raise RuntimeError(f"{rank} failed:\n{answer}")
    return answer


def gather(args: argparse.Namespace, ranks: int) -> tuple[int, dict[str, Times]]:
    """The bytes of the state, and for each measure the slowest rank's values.

    Raises:
        RuntimeError: a rank failed; the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    processes, ends, answers = [], [], {}
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="checkpoint-benchmark-") as folder:
        try:
            for rank in range(ranks):
                here, there = context.Pipe()
                process = context.Process(target=serve, args=(there, args, (rank, ranks), folder))
                process.start()
                there.close()  # so that the process's end is noticed here
                processes.append(process)
                ends.append(here)
            while len(answers) < ranks:
                for end in wait([each for each in ends if each not in answers]):
                    answers[end] = receive(end, f"rank {ends.index(end)} of {ranks}")
            for end in ends:
                end.send(None)
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
                process.join()
    size, first = answers[ends[0]]
    others = [answers[end][1] for end in ends]
    return size, {
        kind: {
            key: [max(each) for each in zip(*(o[kind][key] for o in others), strict=True)] for key in times
        }
        for kind, times in first.items()
    }


def speeds(times: Times, settings: dict, size: int) -> list[dict]:
    """One line per measure and contender; ratios are of medians, above 1 where it is faster."""
    lines = []
    for (measure, name), values in times.items():
        median = statistics.median(values)
        line = {"benchmark": "checkpoint", "measure": measure, "contender": name, **settings}
        line["mb_per_s"] = round(size / 1e6 / median)
        line["mb_per_s_rounds"] = [round(size / 1e6 / value) for value in values]
        for base in BASES:
            if (measure, base) in times and base != name:
                line[f"ratio_to_{base}"] = round(statistics.median(times[measure, base]) / median, 3)
        lines.append(line)
    return lines


def stalls(times: Times, settings: dict) -> list[dict]:
    """One line per contender, in milliseconds."""
    lines = []
    for name in dict.fromkeys(name for _, name in times):
        found = {measure: values for (measure, of), values in times.items() if of == name}
        medians = {measure: statistics.median(values) for measure, values in found.items()}
        line = {"benchmark": "checkpoint", "measure": "stall", "contender": name, **settings}
        line |= {f"{each}_ms": round(1e3 * medians[each], 1) for each in MILLISECONDS}
        line["stall_ms_rounds"] = [round(1e3 * value, 1) for value in found["stall"]]
        line["ratio_to_blocking"] = round(medians["stall"] / medians["blocking"], 3)
        line["slowdown"] = round(medians["slowdown"], 3)
        lines.append(line)
    return lines


def table(lines: Sequence[dict]) -> str:
    """The lines as a table for people; `of X` is the speed as a multiple of X's."""
    files = [line for line in lines if line["measure"] != "stall"]
    stalled = [line for line in lines if line["measure"] == "stall"]
    rows = []
    if files:
        bases = [base for base in BASES if any(f"ratio_to_{base}" in line for line in files)]
        rows.append(["ranks", "", "", "MB/s", "from-to", *(f"of {base}" for base in bases)])
        for line in files:
            rounds = line["mb_per_s_rounds"]
            row = [line["ranks"], line["measure"], line["contender"], line["mb_per_s"]]
            row.append(f"{min(rounds)}-{max(rounds)}")
            rows.append([*row, *(line.get(f"ratio_to_{base}", "") for base in bases)])
    text = _aligned(rows)
    if stalled:
        rows = [["ranks", "", "", *(f"{each} ms" for each in MILLISECONDS), "of blocking", "slowdown"]]
        for line in stalled:
            row = [line["ranks"], "stall", line["contender"], *(line[f"{each}_ms"] for each in MILLISECONDS)]
            rows.append([*row, line["ratio_to_blocking"], line["slowdown"]])
        text += "\n" + _aligned(rows)
    return text


def _aligned(rows: Sequence[Sequence[object]]) -> str:
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n"
        for row in rows
    )


def main() -> int:
    args = arguments()
    # So that files are removed and the ranks are ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    for ranks in args.ranks:
        size, found = gather(args, ranks)
        machine = f"{platform.machine()} {os.cpu_count()} cpus"
        settings = {"ranks": ranks, "gigabytes": round(size / 1e9, 3), "machine": machine}
        lines = speeds(found.get("speed", {}), settings, size) + stalls(found.get("stall", {}), settings)
        if args.jsonl:
            with args.jsonl.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        print(table(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
