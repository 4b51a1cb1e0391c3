"""A group that moves nothing: one member of a group whose others do not exist.

It works on meta tensors, so one rank of a job of any size can be built and traced on a laptop.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megazero.mpu.grid import Ranks
from megazero.mpu.group import DONE, Group, Reduction, Transfer, Work


class StillGroup(Group):
    """Member `rank` of a group of `ranks` of which only this member exists.

    Results are what equal members would give as far as shapes go; values are this member's own.
    """

    def __init__(self, name: str, rank: int, ranks: Ranks):
        self.name = name
        self.rank = rank
        self.ranks = ranks

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False) -> Work:
        return DONE

    def all_gather(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        output.view(self.size, -1).copy_(tensor.reshape(1, -1).expand(self.size, -1))
        return DONE

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        output.copy_(tensor.reshape(self.size, -1)[self.rank].view(output.shape))
        return DONE

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
        return DONE

    def broadcast(self, tensor: Tensor, source: int, *, async_op: bool = False) -> Work:
        return DONE

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        return [DONE] * len(transfers)

    def barrier(self) -> None:
        return None
