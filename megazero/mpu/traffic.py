"""The traffic of a rank: the calls and bytes of each communicator, counted or recorded.

Counting happens during a real run. Recording is counting over groups that move nothing, so both report the
same communicators and operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megazero.mpu.context import ParallelContext, make_context
from megazero.mpu.grid import ProcessGrid, Ranks
from megazero.mpu.group import Group, Transfer, Work
from megazero.mpu.still_group import StillGroup
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup


@dataclass
class TrafficLog:
    """Calls and payload bytes by (name of the communicator, operation).

    The payload is the size of the larger side of a call: the tensor for all_reduce, broadcast, send and
    receive, the whole output for all_gather, the whole input for reduce_scatter and all_to_all.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    payload: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, group: str, operation: str, tensor: Tensor) -> None:
        """Count one call."""
        self.calls[group, operation] += 1
        self.payload[group, operation] += tensor.numel() * tensor.element_size()

    def clear(self) -> None:
        """Forget everything counted so far."""
        self.calls.clear()
        self.payload.clear()


class CountingGroup(WrappingGroup):
    """Passes every call on to `inner` and adds it to `log`.

    Args:
        inner: the group that communicates.
        log: where calls are added up; groups may share one.
        name: the group's name in the log; the inner group's name by default.
    """

    def __init__(self, inner: Group, log: TrafficLog, name: str | None = None):
        super().__init__(inner, name)
        self.log = log

    def _collective(self, call: GroupCall) -> Work:
        self.log.add(self.name, call.operation, call.payload)
        return call.start(self.inner)

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        for transfer in transfers:
            self.log.add(self.name, transfer.kind, transfer.tensor)
        return self.inner.exchange(transfers)


def count_traffic(context: ParallelContext, log: TrafficLog) -> ParallelContext:
    """The same context with every communicator of more than one rank counted under its own name."""
    groups = {
        name: group if group.size == 1 else CountingGroup(group, log, name)
        for name, group in context.groups.items()
    }
    return replace(context, groups=groups)


def recording_context(
    grid: ProcessGrid,
    rank: int,
    log: TrafficLog,
    device: torch.device | str = "meta",
    *,
    node_size: int = 1,
    seconds: Sequence[str] = (),
) -> ParallelContext:
    """The context of one rank in a job that does not run: its groups move nothing, and `log` counts calls."""

    def maker(name: str, ranks: Ranks) -> Group:
        return StillGroup(name, ranks.index(rank), ranks)

    context = make_context(grid, rank, torch.device(device), maker, node_size=node_size, seconds=seconds)
    return count_traffic(context, log)
