"""A group that counts what goes through another: calls and payload, as in `RecordingGroup`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group, Reduction, Transfer, Work
from megazero.mpu.recording_group import TrafficLog


class CountingGroup:
    """Passes every call on to `inner` and adds it to `log`.

    Args:
        inner: the group that communicates.
        log: where calls are added up; groups may share one.
        name: what the log calls it; default: the inner group's name.
    """

    def __init__(self, inner: Group, log: TrafficLog, name: str | None = None):
        self.inner = inner
        self.log = log
        self.name = name or inner.name
        self.rank = inner.rank
        self.ranks = inner.ranks

    @property
    def size(self) -> int:
        return self.inner.size

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False) -> Work:
        self.log.add(self.name, "all_reduce", tensor)
        return self.inner.all_reduce(tensor, op, async_op=async_op)

    def all_gather(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        self.log.add(self.name, "all_gather", output)
        return self.inner.all_gather(output, tensor, async_op=async_op)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        self.log.add(self.name, "reduce_scatter", tensor)
        return self.inner.reduce_scatter(output, tensor, op, async_op=async_op)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work:
        self.log.add(self.name, "all_to_all", tensor)
        return self.inner.all_to_all(output, tensor, output_splits, input_splits, async_op=async_op)

    def broadcast(self, tensor: Tensor, source: int, *, async_op: bool = False) -> Work:
        self.log.add(self.name, "broadcast", tensor)
        return self.inner.broadcast(tensor, source, async_op=async_op)

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        for transfer in transfers:
            self.log.add(self.name, transfer.kind, transfer.tensor)
        return self.inner.exchange(transfers)

    def barrier(self) -> None:
        self.inner.barrier()


def count_traffic(context: ParallelContext, log: TrafficLog) -> ParallelContext:
    """The same context with every communicator of more than one rank counted under its own name."""
    groups = {
        name: group if group.size == 1 else CountingGroup(group, log, name)
        for name, group in context.groups.items()
    }
    return replace(context, groups=groups)
