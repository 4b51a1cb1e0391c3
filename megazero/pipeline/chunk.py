"""`Chunk`: the executor's view of a part of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from megazero.loss import LossTerm

Deferred = list[Callable[[], nn.Parameter]]
B_contra = TypeVar("B_contra", contravariant=True)


class Chunk(Protocol[B_contra]):
    """A contiguous part of the model, which computes micro-batches of type `B`."""

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of the hidden states between chunks."""

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The loss terms of the whole model; the same on all ranks, in the same order."""

    def hidden_shape(self, batch: B_contra) -> tuple[int, ...]:
        """The shape of the hidden states between chunks, for this micro-batch."""

    def run(
        self, batch: B_contra, hidden: Tensor | None, *, deferred: Deferred | None
    ) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Compute the chunk for a micro-batch.

        Args:
            batch: the micro-batch.
            hidden: hidden states of the previous chunk; None for the first.
            deferred: collects the computation of weight gradients, which backward then leaves out.

        Returns:
            The chunk's hidden states, or None from the last chunk; and what it adds up over the micro-batch,
            by name. To loss terms it adds float32 scalars, equal on all tensor-parallel ranks. Other names
            are tallies: tensors that are only added up, such as how many tokens each expert got here.
        """
