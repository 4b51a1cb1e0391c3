"""A group of one: every collective is the identity, so no code asks whether it runs in parallel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megazero.mpu.grid import Ranks
from megazero.mpu.group import DONE, Group, Reduction, Transfer, Work


class SoloGroup(Group):
    """The communicator of a single rank."""

    def __init__(self, name: str = "solo", world_rank: int = 0):
        self.name = name
        self.rank = 0
        self.ranks: Ranks = range(world_rank, world_rank + 1)

    @property
    def size(self) -> int:
        return 1

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False) -> Work:
        return DONE

    def all_gather(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        return _copy(output, tensor)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        return _copy(output, tensor)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work:
        return _copy(output, tensor)

    def broadcast(self, tensor: Tensor, source: int, *, async_op: bool = False) -> Work:
        assert source == 0, f"a group of one has no rank {source}"
        return DONE

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        sent: dict[int, list[Tensor]] = {}
        for transfer in transfers:
            if transfer.kind == "send":
                sent.setdefault(transfer.tag, []).append(transfer.tensor.clone())
        for transfer in transfers:
            if transfer.kind == "recv":
                transfer.tensor.copy_(sent[transfer.tag].pop(0))
        return [DONE] * len(transfers)

    def barrier(self) -> None:
        return None


def _copy(output: Tensor, tensor: Tensor) -> Work:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)
    return DONE
