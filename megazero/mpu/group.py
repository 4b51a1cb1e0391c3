"""The protocol for one communicator. All communication in megazero goes through it.

Tensors are contiguous. Collectives act in place or into a given output; with ``async_op=True`` they
return at once and the result is ready after `Work.wait`. Every member makes the same calls in the
same order with the same shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from megazero.mpu.grid import Ranks

Reduction = Literal["sum", "max", "min"]


class Work(Protocol):
    """A collective in progress."""

    def wait(self) -> object:
        """Return when the result is ready; over NCCL, when what is queued from now on will wait for it."""


class Done(Work):
    """A collective that has already happened."""

    def wait(self) -> None:
        return None


DONE = Done()


@dataclass(frozen=True)
class Transfer:
    """One message of a batch: the tensor is sent to or received from group rank `peer`, as `kind` says.

    Messages with the same `tag` between two ranks arrive in the order they were sent.
    """

    kind: Literal["send", "recv"]
    tensor: Tensor
    peer: int
    tag: int = 0


@runtime_checkable
class Group(Protocol):
    """One communicator, as one of its members sees it."""

    name: str
    rank: int  # this process's rank within the group
    ranks: Ranks  # the members' world ranks

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False) -> Work:
        """Reduce `tensor` over the members, in place."""

    def all_gather(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        """Concatenate the members' `tensor` [n, ...] along dim 0 into `output` [size * n, ...]."""

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        """Reduce `tensor` [size * n, ...] and keep this member's rows in `output` [n, ...]."""

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Send rows of `tensor` to each member and receive rows from each; splits count rows."""

    def broadcast(self, tensor: Tensor, source: int, *, async_op: bool = False) -> Work:
        """Overwrite `tensor` with the one on group rank `source`."""

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        """Start a batch of sends and receives, and return the work of each, in the order given.

        The order within a batch does not matter. Two ranks start the batches between them in the same order.
        """

    def barrier(self) -> None:
        """Return when every member has called it."""
