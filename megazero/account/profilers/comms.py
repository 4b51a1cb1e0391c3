"""The comms logger: how often a rank communicates, how much, how long, and for whom it waits."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from megazero.account.profiler import ProfiledRun, Profiler
from megazero.account.profilers.calls import CollectiveCall, rates
from megazero.account.profilers.clock import Clock, ClockPoint
from megazero.account.profilers.comms_table import (
    CallKind,
    CallTotals,
    CommsLine,
    Waiting,
    comms_table,
    size_text,
    trimmed_mean,
)
from megazero.account.profilers.files import Folder
from megazero.account.profilers.group import Listener
from megazero.config.tree.logging import LoggingConfig
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group

MESSAGES = ("send", "recv")
_SIZES = 64  # of an operation that are told apart
_HIDDEN = 2e-5  # seconds: a shorter wait for a call found it complete


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
        self.rows: dict[str, dict[CallKind, CallTotals]] = {}
        self._sizes: dict[tuple[str, str], set[int]] = {}
        self._begun: dict[tuple[str, int], tuple[ClockPoint, ClockPoint]] = {}
        self._pending: list[tuple[CollectiveCall, ClockPoint, tuple[ClockPoint, ...]]] = []
        self._say: Callable[[str], None] = print

    def begin(self, run: ProfiledRun) -> None:
        self._say = run.say

    @contextmanager
    def over_step(self, iteration: int) -> Iterator[None]:
        yield
        self.settle()

    def enters(self, call: CollectiveCall, *, waits: bool) -> ClockPoint:
        wanted = self.settings.comms_logger_ops
        return None if wanted and call.operation not in wanted else self.clock.now()

    def leaves(self, call: CollectiveCall, entered: ClockPoint, *, waits: bool) -> None:
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
        lines: list[CommsLine] = []
        waiting: list[Waiting] = []
        # All ranks come to the groups in the order of their names, so none waits for one that waits for it.
        for name, group in sorted(self.context.groups.items()):
            if group.size > 1:
                rows = self.rows.get(name, {})
                waits, among = compare_waits(group, rows, self.context.device)
                lines += [CommsLine(name, group.size, key, rows[key], waits.get(key)) for key in sorted(rows)]
                waiting += [] if among is None else [Waiting(name, *among)]
        for text in comms_table(lines, waiting):
            self._say(f"communication of rank 0 | {text}")
        report = {
            "rank": self.context.rank,
            "calls": [line.as_json() for line in lines],
            "waits": [vars(one) for one in waiting],
        }
        self.folder.write(f"comms_rank{self.context.rank}.json", json.dumps(report, indent=1).encode())

    def _row(self, call: CollectiveCall) -> CallTotals:
        sizes, nbytes = self._sizes.setdefault((call.group, call.operation), set()), call.nbytes
        if nbytes not in sizes and len(sizes) >= _SIZES:
            nbytes = 1 << max(0, nbytes - 1).bit_length()
        sizes.add(nbytes)
        return self.rows.setdefault(call.group, {}).setdefault(CallKind(call.operation, nbytes), CallTotals())


def compare_waits(
    group: Group, rows: Mapping[CallKind, CallTotals], device: torch.device
) -> tuple[dict[CallKind, float], tuple[int, float, float] | None]:
    """The seconds that this rank waited in a call for the last member, by row; every member calls this.

    A call of all members ends at once, so whoever is in it for the shortest time came last. It takes two
    reductions and eight bytes from each member, whatever the group's size. Messages are left out, as they
    have but two ends; and so is all, on all members alike, if these had different calls.

    Returns:
        The seconds; and the world rank that is waited for with the least and the greatest mean wait, or None.
    """
    shared = [(key, rows[key]) for key in sorted(rows) if key.operation not in MESSAGES and rows[key].samples]
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
        waits[key] = trimmed_mean(beyond[at : at + len(row.samples)])
        at += len(row.samples)
    calls = sum(row.calls for _, row in shared)
    mine = sum(waits[key] * row.calls for key, row in shared) / calls
    everyone = torch.empty(group.size, dtype=torch.float64, device=device)
    group.all_gather(everyone, torch.tensor([mine], dtype=torch.float64, device=device)).wait()
    means = everyone.tolist()
    return waits, (group.ranks[means.index(min(means))], min(means), max(means))


def _said(call: CollectiveCall, took: float | None, members: int) -> str:
    what = f"call | {call.group} {call.operation} of {size_text(call.nbytes)}, {members} ranks"
    if took is None:
        return what
    algorithm, bus = rates(call.operation, call.nbytes, took, members)
    return f"{what}: {1e3 * took:.3f} ms, {algorithm / 1e9:.3g} GB/s, on the bus {bus / 1e9:.3g} GB/s"
