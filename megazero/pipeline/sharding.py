"""`Gathering` and `Sharding`: the executor's view of the object that keeps the parameters."""

from __future__ import annotations

from typing import Protocol

from torch import nn


class Gathering(Protocol):
    """Keeps the parameters, and makes those of a chunk whole while it computes."""

    def gather(self, chunk: int, *, backward: bool) -> None:
        """Note that the chunk's forward or backward is about to run."""

    def release(self, chunk: int) -> None:
        """Note that the chunk does not compute for now."""


class Sharding(Gathering, Protocol):
    """Keeps the parameters and sums the gradients (see `zero.DataParallel`)."""

    @property
    def most_buffer_bytes(self) -> tuple[int, int]:
        """The most bytes at a time of gathered weights, and of transient gradient buffers."""

    def start(self, step: int) -> None:
        """Begin a step of this number."""

    def begin_backward(self, chunk: int, *, reduce: bool, ends: bool) -> None:
        """Note that the gradients that appear from now on are this chunk's.

        Args:
            chunk: the chunk.
            reduce: whether they complete sums, each of which is then reduced as soon as it is complete.
            ends: whether this is the last backward to bring gradients of its micro-batch.
        """

    def collect(self, param: nn.Parameter) -> None:
        """Take ``param.grad``."""

    def end_backward(self) -> None:
        """Note that no more gradients appear."""

    def reduce(self, chunk: int) -> None:
        """Reduce the chunk's gradients that no backward has reduced."""

    def finish(self) -> None:
        """Wait until the step's sums are complete."""
