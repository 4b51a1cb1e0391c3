"""The comms logger: the number, bytes and times of a rank's calls, and the ranks that it waits for."""

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
_SIZES = 64  # distinct sizes of an operation; further ones are rounded up to powers of two
_HIDDEN = 2e-5  # seconds; a shorter wait means that the call was already complete


class CommsLog(Profiler, Listener):
    """Times the calls of groups, and reports on them at the end of the training.

    The logger never waits itself, so an asynchronous call has a time only if the run waits for it before it
    is complete; other asynchronous calls are counted as hidden. On CUDA, waits are the device's.

    Args:
        context: the ranks' groups, without observers, over which the report is made.
        settings: the operations to time, and whether to print each call.
        folder: the folder for the reports of the chosen ranks.
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
        """Count the calls whose end the device has reached."""
        left = []
        for item in self._pending:
            call, begin, points = item
            if not all(map(self.clock.reached, points)):
                left.append(item)
                continue
            spans = [self.clock.seconds(*points[at : at + 2]) for at in range(0, len(points), 2)]
            hidden = len(spans) == 2 and spans[1] < _HIDDEN
            # A message also waits for the sender's computation, so its time is not that of the link.
            unknown = hidden or call.operation in MESSAGES
            took = None if unknown else self.clock.seconds(begin, points[-1])
            self._row(call).add(sum(spans), took, hidden=hidden)
            if self.settings.comms_logger_verbose:
                self._say(_said(call, took, len(call.ranks)))
        self._pending = left

    def conclude(self) -> None:
        """Compare the waits within each group, print rank 0's table, and write the chosen ranks' reports."""
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        self.settle()
        lines: list[CommsLine] = []
        waiting: list[Waiting] = []
        # All ranks go through the groups in the order of their names, which avoids deadlocks.
        for name, group in sorted(self.context.groups.items()):
            if group.size > 1:
                rows = self.rows.get(name, {})
                waits, extremes = compare_waits(group, rows, self.context.device)
                lines += [CommsLine(name, group.size, key, rows[key], waits.get(key)) for key in sorted(rows)]
                waiting += [] if extremes is None else [Waiting(name, *extremes)]
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
    """Compute the mean seconds that this rank waited in a call for the last member; every member calls this.

    All members leave a call at the same time, so the member with the shortest time in it came last. Messages
    are left out, because only two ranks take part. If the members had different calls, nothing is compared.

    Returns:
        The seconds by row; and (the world rank that is waited for, the least mean wait, the greatest), or
        None if nothing was compared.
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
    mean = sum(waits[key] * row.calls for key, row in shared) / calls
    everyone = torch.empty(group.size, dtype=torch.float64, device=device)
    group.all_gather(everyone, torch.tensor([mean], dtype=torch.float64, device=device)).wait()
    means = everyone.tolist()
    return waits, (group.ranks[means.index(min(means))], min(means), max(means))


def _said(call: CollectiveCall, took: float | None, members: int) -> str:
    what = f"call | {call.group} {call.operation} of {size_text(call.nbytes)}, {members} ranks"
    if took is None:
        return what
    algorithm, bus = rates(call.operation, call.nbytes, took, members)
    return f"{what}: {1e3 * took:.3f} ms, {algorithm / 1e9:.3g} GB/s, on the bus {bus / 1e9:.3g} GB/s"
