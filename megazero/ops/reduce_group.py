"""The communicator that the losses over a sliced vocabulary take."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor


class ReduceGroup(Protocol):
    """The ranks that hold the slices; `mpu.Group` is one."""

    rank: int

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> object:
        """Reduce over the group's ranks in place, by "sum" or "max"."""
