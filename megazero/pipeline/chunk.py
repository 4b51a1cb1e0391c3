"""`Chunk` and `Sharding`: the executor's view of a part of the model, and of its sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from megazero.loss import LossTerm

Deferred = list[Callable[[], nn.Parameter]]
B_contra = TypeVar("B_contra", contravariant=True)


class Boundary(NamedTuple):
    """The hidden states between two chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialized buffer to receive them in."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class ChunkResult:
    """The result of a chunk for one micro-batch.

    Attributes:
        hidden: the hidden states for the next chunk; None from the last one.
        terms: name of a loss term -> this chunk's summand, a float32 scalar, equal on all tensor-parallel
            ranks.
        tallies: name -> a tensor that is only summed over micro-batches, such as each expert's token count.
        outputs: name -> values of this micro-batch alone, such as the loss of each sample. Evaluation keeps
            them, training does not.
    """

    hidden: Tensor | None
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    tallies: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


class Chunk(Protocol[B_contra]):
    """A contiguous part of the model. It computes micro-batches of type `B`."""

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The loss terms of the whole model; the same on all ranks, in the same order."""

    def input_boundary(self, batch: B_contra) -> Boundary:
        """The hidden states that the chunk receives for this micro-batch; not called on the first chunk."""

    def output_boundary(self, batch: B_contra) -> Boundary:
        """The hidden states that the chunk returns; not called on the last chunk."""

    def run(self, batch: B_contra, hidden: Tensor | None, *, deferred: Deferred | None) -> ChunkResult:
        """Compute the chunk for a micro-batch.

        Args:
            hidden: hidden states of the previous chunk; None for the first.
            deferred: the list to which backward appends the computation of weight gradients instead of
                running it; None if backward computes them itself.
        """


class Sharding(Protocol):
    """Sharded parameters, gathered while a chunk computes, and the sums of their gradients."""

    @property
    def most_buffer_bytes(self) -> tuple[int, int]:
        """The peak bytes of gathered weights, and of transient gradient buffers."""

    def gather(self, chunk: int, *, backward: bool) -> None:
        """Start to gather the chunk's parameters for its forward (or backward)."""

    def release(self, chunk: int) -> None:
        """Free the chunk's gathered parameters."""

    def start(self, step: int) -> None:
        """Begin the step of this number."""

    def begin_backward(self, chunk: int, *, reduce: bool, ends: bool) -> None:
        """Announce that gradients from now on are this chunk's.

        Args:
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
