"""`Gathering` and `Sharding`: the executor's view of the sharded parameters and gradients."""

from __future__ import annotations

from typing import Protocol

from torch import nn


class Gathering(Protocol):
    """Sharded parameters that are gathered while their chunk computes."""

    def gather(self, chunk: int, *, backward: bool) -> None:
        """Start to gather the chunk's parameters for its forward (or backward)."""

    def release(self, chunk: int) -> None:
        """Free the chunk's gathered parameters."""


class Sharding(Gathering, Protocol):
    """Sharded parameters and the sums of their gradients (see `zero.DataParallel`)."""

    @property
    def most_buffer_bytes(self) -> tuple[int, int]:
        """The peak bytes of gathered weights, and of transient gradient buffers."""

    def start(self, step: int) -> None:
        """Begin the step of this number."""

    def begin_backward(self, chunk: int, *, reduce: bool, ends: bool) -> None:
        """Announce that gradients from now on are this chunk's.

        Args:
            chunk: the chunk.
            reduce: whether this backward completes sums; each bucket is then reduced once it is complete.
            ends: whether this is the micro-batch's last backward through the chunk.
        """

    def collect(self, param: nn.Parameter) -> None:
        """Add ``param.grad`` to the sums."""

    def end_backward(self) -> None:
        """Announce that the backward has ended."""

    def reduce(self, chunk: int) -> None:
        """Reduce the gradients of the chunk that no backward has reduced."""

    def finish(self) -> None:
        """Wait until the step's gradient sums are complete."""
