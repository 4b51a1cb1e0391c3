"""The comms logger: how often a rank communicates, how much, how long, and for whom it waits."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch

from megazero.account.profiler import ProfiledRun, Profiler
from megazero.account.profilers.bandwidth import rates
from megazero.account.profilers.clock import Clock
from megazero.account.profilers.files import Folder
from megazero.account.profilers.group import Call, Listener
from megazero.config.tree.logging import LoggingConfig
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group

MESSAGES = ("send", "recv")
_SAMPLES = 4096  # of a row, at most
_SIZES = 64  # of an operation that are told apart
_HIDDEN = 2e-5  # seconds: a shorter wait for a call found it complete
_UNEVEN = 0.25  # of the longest wait, by which the shortest is shorter where a rank comes last
_TRIMMED = 0.1  # of a row's calls are left out of its means at either end: the first ones connect


class Key(NamedTuple):
    """Facts that the calls of a row share; `nbytes` is 2^k for calls of above half as much, up to it."""

    operation: str
    nbytes: int


@dataclass
class Row:
    """The calls of one operation and size.

    Attributes:
        calls: how many there were.
        hidden: those of them that were complete when they were waited for.
        exposed: seconds that the host or the device waited in them.
        samples: (waited, took) in seconds of some of them, evenly spread; the second is None for messages and
            for hidden ones.
    """

    calls: int = 0
    hidden: int = 0
    exposed: float = 0.0
    samples: list[tuple[float, float | None]] = field(default_factory=list)
    _stride: int = 1

    def add(self, waited: float, took: float | None, *, hidden: bool = False) -> None:
        """Count a call. Which calls become samples depends on their number alone, as on other members."""
        if self.calls % self._stride == 0:
            self.samples.append((waited, took))
            if len(self.samples) == _SAMPLES:
                self.samples, self._stride = self.samples[::2], 2 * self._stride
        self.calls += 1
        self.exposed += waited
        self.hidden += hidden


@dataclass(frozen=True)
class Line:
    """A row as it is reported.

    Attributes:
        group, members: the group's name and size.
        key, row: the calls.
        waited: the seconds of a call that this rank waited for the last member to come; None if that is not
            known.
    """

    group: str
    members: int
    key: Key
    row: Row
    waited: float | None = None

    @property
    def seconds(self) -> float | None:
        """The mean time of a call, hidden ones left out; None if all were, and for messages."""
        took = [took for _, took in self.row.samples if took is not None]
        return _mean(took) if took else None

    @property
    def rates(self) -> tuple[float, float] | None:
        """Algorithm and bus bandwidth in bytes per second, once all members were there."""
        seconds = self.seconds
        if seconds is None or self.key.operation == "barrier":
            return None
        return rates(*self.key, seconds - (self.waited or 0.0), self.members)

    def as_json(self) -> dict[str, Any]:
        """The line as JSON; rates are in GB/s."""
        pair, row = self.rates, self.row
        algorithm, bus = (None, None) if pair is None else (rate / 1e9 for rate in pair)
        counted = {"calls": row.calls, "hidden": row.hidden, "exposed": row.exposed}
        times = {"seconds": self.seconds, "waited": self.waited}
        speeds = {"algorithm_gb_per_s": algorithm, "bus_gb_per_s": bus}
        place = {"group": self.group, "members": self.members}
        return {**place, **self.key._asdict(), **counted, **times, **speeds}


@dataclass(frozen=True)
class Waiting:
    """The waits of a group's members for each other, per call.

    Attributes:
        group: the group's name.
        last: the world rank that waited least: the others wait for it.
        least, most: seconds that it waited, and that the rank waited that did so longest.
    """

    group: str
    last: int
    least: float
    most: float


class CommsLog(Profiler, Listener):
    """Times the calls of groups, and reports on them when the training is over.

    The host waits for nothing, so a call that runs beside computation has a time only if somebody came to
    wait for it before it was complete; the others are counted as hidden. On CUDA the waits are the device's.

    Args:
        context: the ranks; the report is made over its groups, which are not observed.
        settings: which operations to time, and whether to say each call.
        folder: where the ranks that are chosen write their report.
        clock: times the calls.
    """

    def __init__(self, context: ParallelContext, settings: LoggingConfig, folder: Folder, clock: Clock):
        self.context = context
        self.settings = settings
        self.folder = folder
        self.clock = clock
        self.rows: dict[str, dict[Key, Row]] = {}
        self._sizes: dict[tuple[str, str], set[int]] = {}
        self._begun: dict[tuple[str, int], tuple[Any, Any]] = {}
        self._pending: list[tuple[Call, Any, tuple[Any, ...]]] = []
        self._say: Callable[[str], None] = print

    def begin(self, run: ProfiledRun) -> None:
        self._say = run.say

    @contextmanager
    def over_step(self, iteration: int) -> Iterator[None]:
        yield
        self.settle()

    def enters(self, call: Call, *, waits: bool) -> Any:
        wanted = self.settings.comms_logger_ops
        return None if wanted and call.operation not in wanted else self.clock.now()

    def leaves(self, call: Call, entered: Any, *, waits: bool) -> None:
        if entered is None:
            return
        now = self.clock.now()
        if waits:
            begun = self._begun.pop((call.group, call.number))
            self._pending.append((call, begun[0], (*begun, entered, now)))
        elif call.later:
            self._begun[call.group, call.number] = entered, now
        else:
            self._pending.append((call, entered, (entered, now)))

    def settle(self) -> None:
        """Count the calls whose times are known by now."""
        left = []
        for item in self._pending:
            call, begin, points = item
            if not all(map(self.clock.reached, points)):
                left.append(item)
                continue
            spans = [self.clock.seconds(*points[at : at + 2]) for at in range(0, len(points), 2)]
            hidden = len(spans) == 2 and spans[1] < _HIDDEN
            # A message also waits for the other end to compute it, so its time says nothing of the link.
            unknown = hidden or call.operation in MESSAGES
            took = None if unknown else self.clock.seconds(begin, points[-1])
            self._row(call).add(sum(spans), took, hidden=hidden)
            if self.settings.comms_logger_verbose:
                self._say(_said(call, took, len(call.ranks)))
        self._pending = left

    def conclude(self) -> None:
        """Compare the waits within each group, print the first rank's table and write those of the chosen."""
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        self.settle()
        lines: list[Line] = []
        waiting: list[Waiting] = []
        # All ranks come to the groups in the order of their names, so none waits for one that waits for it.
        for name, group in sorted(self.context.groups.items()):
            if group.size > 1:
                rows = self.rows.get(name, {})
                waits, among = compare_waits(group, rows, self.context.device)
                lines += [Line(name, group.size, key, row, waits.get(key)) for key, row in _in_order(rows)]
                waiting += [] if among is None else [Waiting(name, *among)]
        for text in comms_table(lines, waiting):
            self._say(f"communication of rank 0 | {text}")
        report = {
            "rank": self.context.rank,
            "calls": [line.as_json() for line in lines],
            "waits": [vars(one) for one in waiting],
        }
        self.folder.write(f"comms_rank{self.context.rank}.json", json.dumps(report, indent=1).encode())

    def _row(self, call: Call) -> Row:
        sizes, nbytes = self._sizes.setdefault((call.group, call.operation), set()), call.nbytes
        if nbytes not in sizes and len(sizes) >= _SIZES:
            nbytes = 1 << max(0, nbytes - 1).bit_length()
        sizes.add(nbytes)
        return self.rows.setdefault(call.group, {}).setdefault(Key(call.operation, nbytes), Row())


def compare_waits(
    group: Group, rows: Mapping[Key, Row], device: torch.device
) -> tuple[dict[Key, float], tuple[int, float, float] | None]:
    """The seconds that this rank waited in a call for the last member, by row; every member calls this.

    A call of all members ends at once, so whoever is in it for the shortest time came last. It takes two
    reductions and eight bytes from each member, whatever the group's size. Messages are left out, as they
    have but two ends; and so is all, on all members alike, if these had different calls.

    Returns:
        The seconds; and the world rank that is waited for with the least and the greatest mean wait, or None.
    """
    shared = [(key, row) for key, row in _in_order(rows) if key.operation not in MESSAGES and row.samples]
    described = json.dumps([[*key, row.calls] for key, row in shared]).encode()
    mark = zlib.crc32(described)
    marks = torch.tensor([mark, -mark], dtype=torch.int64, device=device)
    group.all_reduce(marks, "max").wait()
    highest, lowest = marks.tolist()
    if highest != -lowest or not shared:
        return {}, None
    own = torch.tensor([waited for _, row in shared for waited, _ in row.samples], dtype=torch.float64)
    least = own.to(device, copy=True)
    group.all_reduce(least, "min").wait()
    beyond = (own - least.cpu()).tolist()
    waits, at = {}, 0
    for key, row in shared:
        waits[key] = _mean(beyond[at : at + len(row.samples)])
        at += len(row.samples)
    calls = sum(row.calls for _, row in shared)
    mine = sum(waits[key] * row.calls for key, row in shared) / calls
    everyone = torch.empty(group.size, dtype=torch.float64, device=device)
    group.all_gather(everyone, torch.tensor([mine], dtype=torch.float64, device=device)).wait()
    means = everyone.tolist()
    return waits, (group.ranks[means.index(min(means))], min(means), max(means))


def comms_table(lines: Iterable[Line], waiting: Iterable[Waiting]) -> list[str]:
    """The report as lines of text."""
    heads = ("group", "operation", "size", "calls", "hidden", "exposed ms", "mean ms", "waited ms")
    widths = (16, 15, 11, 8, 8, 12, 10, 10)
    text = [_joined((*heads, "alg GB/s", "bus GB/s"), (*widths, 10, 10))]
    for line in lines:
        pair = line.rates
        cells = (
            f"{line.group} ({line.members})",
            line.key.operation,
            size_text(line.key.nbytes),
            str(line.row.calls),
            str(line.row.hidden),
            f"{1e3 * line.row.exposed:.1f}",
            *(("-" if x is None else f"{1e3 * x:.3f}") for x in (line.seconds, line.waited)),
            *(("-", "-") if pair is None else (f"{x / 1e9:.3g}" for x in pair)),
        )
        text.append(_joined(cells, (*widths, 10, 10)))
    for one in waiting:
        if one.most - one.least > _UNEVEN * one.most:
            text.append(
                f"{one.group}: rank {one.last} comes last: others wait up to {1e3 * one.most:.3f} ms in a "
                f"call, and it waits for {1e3 * one.least:.3f} ms"
            )
    return text


def size_text(nbytes: int) -> str:
    """``1.5 MiB``."""
    power = max(0, min((nbytes.bit_length() - 1) // 10, 4))
    return f"{nbytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _in_order(rows: Mapping[Key, Row]) -> list[tuple[Key, Row]]:
    return sorted(rows.items(), key=lambda item: item[0])


def _mean(values: list[float]) -> float:
    """The mean without the lowest and the highest tenth."""
    cut = int(len(values) * _TRIMMED)
    return fmean(sorted(values)[cut : len(values) - cut])


def _joined(cells: Iterable[str], widths: Iterable[int]) -> str:
    padded = [
        cell.ljust(width) if at < 2 else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "".join(padded).rstrip()


def _said(call: Call, took: float | None, members: int) -> str:
    what = f"call | {call.group} {call.operation} of {size_text(call.nbytes)}, {members} ranks"
    if took is None:
        return what
    algorithm, bus = rates(call.operation, call.nbytes, took, members)
    return f"{what}: {1e3 * took:.3f} ms, {algorithm / 1e9:.3g} GB/s, on the bus {bus / 1e9:.3g} GB/s"
