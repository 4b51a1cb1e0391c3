"""Merge the traces of ranks, with clocks aligned by the ends of the ranks' common calls."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megazero.errors import DataError

_NAME = re.compile(r"rank(\d+)\.json(\.gz)?")
_LABEL = re.compile(r"[\w]+@\d+ (all_reduce|all_gather|reduce_scatter|all_to_all|barrier) #\d+")
_SAME_CLOCK = 20_000.0  # microseconds; ranks of one host leave a call within this time
_PID_STRIDE = 10_000_000  # between the process numbers of two ranks


@dataclass(frozen=True)
class Alignment:
    """The offset of a rank's clock from the first rank's.

    Attributes:
        rank: the rank.
        ahead: the offset in microseconds.
        calls: the number of common calls that it follows from; 0 if no chain of them leads to the first rank.
        scatter: the median deviation of single calls from the offset, in microseconds.
    """

    rank: int
    ahead: float
    calls: int
    scatter: float


def merge_traces(folder: Path, output: Path) -> list[Alignment]:
    """Merge the traces of one step into one file that chrome://tracing and Perfetto open.

    All members leave a call at the same time, because none can leave before the last arrives. So the offset
    of two clocks is the median difference of the ends of common calls; ranks without common calls are aligned
    through other ranks.

    Args:
        folder: has a file `rank<N>.json.gz` or `rank<N>.json` for each rank.
        output: the file to write, compressed if its name ends in `.gz`.

    Raises:
        DataError: there is no trace, or one cannot be read.
    """
    files = {int(m[1]): path for path in sorted(folder.glob("rank*")) if (m := _NAME.fullmatch(path.name))}
    if not files:
        raise DataError(
            f"`{folder}` must hold traces named rank<N>.json.gz, but has none; name another folder"
        )
    files = dict(sorted(files.items()))
    alignments = align({rank: EndsOfCalls.of(read_trace(path)) for rank, path in files.items()})
    ahead = {one.rank: one.ahead for one in alignments}
    with gzip.open(output, "wt") if output.suffix == ".gz" else output.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        origin: float | None = None
        for number, (rank, path) in enumerate(files.items()):
            trace = read_trace(path)
            shift = _base(trace) - ahead[rank]
            origin = shift if origin is None else origin
            for at, event in enumerate(_moved(trace["traceEvents"], rank, shift - origin)):
                file.write((",\n" if number or at else "") + json.dumps(event))
        file.write("\n]}\n")
    return alignments


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace.

    Raises:
        DataError: the file is not a whole trace.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            trace = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"`{path}` must be a Chrome trace, but cannot be read: {error}; leave it out"
        ) from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise DataError(f"`{path}` must be a Chrome trace, but has no events; leave it out")
    return trace


@dataclass(frozen=True)
class EndsOfCalls:
    """The ends of one rank's calls.

    Attributes:
        host: the rank's host.
        at: microseconds on the rank's clock, by the call's name, which is the same on all members.
    """

    host: str
    at: Mapping[str, float]

    @classmethod
    def of(cls, trace: Mapping[str, object]) -> EndsOfCalls:
        """Find the calls in a trace.

        They are NCCL's kernels if there are any, because calls on a device end with them; they are named by
        operation, group and number. Else they are the ranges that `TraceWindow` names.
        """
        return cls(str(trace.get("host_name")), _ends(trace))


def _ends(trace: Mapping[str, Any]) -> dict[str, float]:
    base = _base(trace)
    calls: dict[str, float] = {}
    kernels: dict[str, float] = {}
    counts: dict[str, int] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        name, args = str(event.get("name")), event.get("args", {})
        end = base + float(event["ts"]) + float(event.get("dur", 0.0))
        if _LABEL.fullmatch(name) and event.get("cat") != "gpu_user_annotation":
            calls[name] = end
        elif name.startswith("ncclDevKernel") and "Process Group Ranks" in args:
            operation = args.get("Collective name")
            kind = f"{operation} {args.get('Process Group Name')} {args['Process Group Ranks']}"
            counts[kind] = counts.get(kind, 0) + 1
            if operation not in ("send", "recv"):
                kernels[f"{kind} #{counts[kind]}"] = end
    return kernels or calls


def align(ends: Mapping[int, EndsOfCalls]) -> list[Alignment]:
    """Compute the offset of each rank's clock from the first rank's.

    Ranks of one host have the same clock, unless a large offset shows that two hosts have the same name.
    """
    first, *others = sorted(ends)
    known = {first: Alignment(first, 0.0, len(ends[first].at), 0.0)}
    waiting, reached = set(others), [first]
    while reached:
        near = reached.pop(0)
        for rank in sorted(waiting):
            shared = ends[rank].at.keys() & ends[near].at.keys()
            if not shared:
                continue
            distances = [ends[rank].at[name] - ends[near].at[name] for name in shared]
            middle = median(distances)
            if ends[rank].host == ends[near].host and abs(middle) < _SAME_CLOCK:
                middle = 0.0
            scatter = median(abs(distance - middle) for distance in distances)
            known[rank] = Alignment(rank, known[near].ahead + middle, len(shared), scatter)
            waiting.discard(rank)
            reached.append(rank)
    return [known.get(rank, Alignment(rank, 0.0, 0, 0.0)) for rank in sorted(ends)]


def alignment_lines(alignments: Sequence[Alignment]) -> list[str]:
    """Format a line for each rank."""
    return [
        f"rank {one.rank}: clock {one.ahead / 1e3:+.3f} ms against rank {alignments[0].rank}'s, by "
        f"{one.calls} calls that scatter by {one.scatter / 1e3:.3f} ms"
        if one.calls
        else f"rank {one.rank}: shares no call with the others, so its clock is left as it is"
        for one in alignments
    ]


def _moved(events: Iterable[dict[str, Any]], rank: int, shift: float) -> Iterator[dict[str, Any]]:
    """Yield the events with process numbers and names of their own for the rank, on the common clock."""
    processes: dict[object, int] = {}
    for event in events:
        pid = event.get("pid")
        number = processes.setdefault(pid, rank * _PID_STRIDE + len(processes))
        moved = {**event, "pid": number}
        if "ts" in event:
            moved["ts"] = float(event["ts"]) + shift
        if event.get("ph") in ("s", "t", "f"):  # arrows from call to kernel, numbered in each process
            moved["id"] = rank * _PID_STRIDE + int(event.get("id", 0))
        if event.get("name") == "process_name":
            moved["args"] = {"name": f"rank {rank}: {event.get('args', {}).get('name', pid)}"}
        elif event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": number}
        yield moved


def _base(trace: Mapping[str, Any]) -> float:
    """The origin of a trace's times, in microseconds."""
    return float(trace.get("baseTimeNanoseconds", 0)) / 1e3
