"""A group around another one: the base of those that count, watch, delay or disturb what passes through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megazero.mpu.group import Group, Reduction, Transfer, Work


class GroupCall(NamedTuple):
    """A collective that a group is asked for.

    Attributes:
        operation: the method of `Group`.
        arguments: its positional arguments.
        given: this member's input.
        payload: the larger side, which is `given` but for all_gather.
        detail: the reduction's name, or the source of a broadcast; None for the others.
        async_op: whether the caller waits for it later.
    """

    operation: str
    arguments: tuple[Any, ...]
    given: Tensor
    payload: Tensor
    detail: str | int | None
    async_op: bool

    def start(self, group: Group) -> Work:
        """Ask `group` for it."""
        work: Work = getattr(group, self.operation)(*self.arguments, async_op=self.async_op)
        return work


class WrappingGroup(Group):
    """Passes every call on to `inner`.

    A subclass overrides `_collective`, which all collectives go through, and `exchange` and `barrier` where
    it has to.

    Args:
        inner: the group that communicates.
        name: default: the inner group's.
    """

    def __init__(self, inner: Group, name: str | None = None):
        self.inner = inner
        self.name = name or inner.name
        self.rank = inner.rank
        self.ranks = inner.ranks

    def _collective(self, call: GroupCall) -> Work:
        return call.start(self.inner)

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False) -> Work:
        return self._collective(GroupCall("all_reduce", (tensor, op), tensor, tensor, op, async_op))

    def all_gather(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        return self._collective(GroupCall("all_gather", (output, tensor), tensor, output, None, async_op))

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        return self._collective(
            GroupCall("reduce_scatter", (output, tensor, op), tensor, tensor, op, async_op)
        )

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work:
        arguments = (output, tensor, output_splits, input_splits)
        return self._collective(GroupCall("all_to_all", arguments, tensor, tensor, None, async_op))

    def broadcast(self, tensor: Tensor, source: int, *, async_op: bool = False) -> Work:
        return self._collective(GroupCall("broadcast", (tensor, source), tensor, tensor, source, async_op))

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        return self.inner.exchange(transfers)

    def barrier(self) -> None:
        self.inner.barrier()

    def close(self) -> None:
        """Close the inner group, if it is of a kind that is closed."""
        close = getattr(self.inner, "close", None)
        if close is not None:
            close()
