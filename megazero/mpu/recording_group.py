"""A group that moves nothing and counts everything: what a rank would send, without the other ranks.

It works on meta tensors, so one rank of a job of any size can be traced on a laptop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megazero.mpu.group import DONE, Reduction, Transfer, Work


@dataclass
class TrafficLog:
    """Calls and payload bytes by (group name, operation).

    Payload is the size of the larger side of a call: the tensor for all_reduce, broadcast, send and
    receive, the whole output for all_gather, the whole input for reduce_scatter and all_to_all.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    payload: Counter[tuple[str, str]] = field(default_factory=Counter)

    def table(self) -> list[str]:
        """One line per group and operation: calls and payload."""
        return [
            f"{group:<16}{operation:<16}{self.calls[group, operation]:>10} calls"
            f"{self.payload[group, operation] / 2**20:>14.1f} MiB"
            for group, operation in sorted(self.calls)
        ]

    def add(self, group: str, operation: str, tensor: Tensor) -> None:
        self.calls[group, operation] += 1
        self.payload[group, operation] += tensor.numel() * tensor.element_size()


class RecordingGroup:
    """Member `rank` of a group of `ranks` of which only this member exists.

    Results are what equal members would give as far as shapes go; values are this member's own.
    """

    def __init__(self, name: str, rank: int, ranks: tuple[int, ...], log: TrafficLog):
        self.name = name
        self.rank = rank
        self.ranks = ranks
        self.log = log

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False) -> Work:
        return self._record("all_reduce", tensor)

    def all_gather(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        output.view(self.size, -1).copy_(tensor.reshape(1, -1).expand(self.size, -1))
        return self._record("all_gather", output)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        output.copy_(tensor.reshape(self.size, -1)[self.rank].view(output.shape))
        return self._record("reduce_scatter", tensor)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work:
        output.zero_()
        return self._record("all_to_all", tensor)

    def broadcast(self, tensor: Tensor, source: int, *, async_op: bool = False) -> Work:
        return self._record("broadcast", tensor)

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        return [self._record(transfer.kind, transfer.tensor) for transfer in transfers]

    def barrier(self) -> None:
        return None

    def _record(self, operation: str, tensor: Tensor) -> Work:
        self.log.add(self.name, operation, tensor)
        return DONE
