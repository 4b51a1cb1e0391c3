"""`SampleLosses`: a chunk of a model that tells the loss of each sample instead of the sum over all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from megazero.layers import Deferred
from megazero.loss import LossTerm
from megazero.models.chunk import ModelChunk
from megazero.models.trunk import Sequences


@dataclass(frozen=True)
class NumberedBatch:
    """A micro-batch, and which one of its step it is."""

    number: int
    batch: Sequences

    @property
    def tally(self) -> str:
        """The name of the tally that its losses become."""
        return f"losses of micro-batch {self.number}"


class MeasuredChunk(ModelChunk, Protocol):
    """A chunk of a model that can tell the loss of each sample.

    Attributes:
        head: None in a chunk without one.
    """

    head: nn.Module | None

    def hidden(self, batch: Sequences, hidden: Tensor | None = None) -> Tensor:
        """The hidden states after the chunk's layers."""

    def sample_losses(self, batch: Sequences, hidden: Tensor | None = None) -> Tensor:
        """Of the chunk with the head: the summed loss of each sample over the positions that count, in nats,
        float32 [b].
        """


@dataclass(frozen=True)
class SampleLosses:
    """A chunk of a model, for evaluation; its batches are `NumberedBatch`, with a sample in each row.

    The last chunk adds to the tally of each micro-batch what `sample_losses` gives. It adds to no loss term.
    """

    chunk: MeasuredChunk
    terms: ClassVar[tuple[LossTerm, ...]] = ()

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of the hidden states between chunks."""
        return self.chunk.hidden_dtype

    def hidden_shape(self, batch: NumberedBatch) -> tuple[int, int, int]:
        """As `Trunk.hidden_shape`."""
        return self.chunk.hidden_shape(batch.batch)

    def run(
        self, batch: NumberedBatch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Hidden states for the next chunk; or, of the last one, the losses."""
        if self.chunk.head is None:
            return self.chunk.hidden(batch.batch, hidden), {}
        return None, {batch.tally: self.chunk.sample_losses(batch.batch, hidden)}
