"""`SampleLosses`: a chunk of a model that tells the loss of each sample instead of the sum over all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megazero.layers import Deferred
from megazero.loss import LossTerm
from megazero.models.batch import Batch
from megazero.models.gpt import GPT


@dataclass(frozen=True)
class NumberedBatch:
    """A micro-batch, and which one of its step it is."""

    number: int
    batch: Batch

    @property
    def tally(self) -> str:
        """The name of the tally that its losses become."""
        return f"losses of micro-batch {self.number}"


@dataclass(frozen=True)
class SampleLosses:
    """A chunk of a GPT, for evaluation; its batches are `NumberedBatch`.

    The last chunk adds to the tally of each micro-batch the summed loss of each sample over the positions
    that count, in nats, float32 [b]. It adds to no loss term.
    """

    chunk: GPT
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
        hidden = self.chunk.hidden(batch.batch, hidden)
        if self.chunk.head is None:
            return hidden, {}
        losses = self.chunk.token_losses(self.chunk.head(hidden), batch.batch.labels)
        mask = batch.batch.loss_mask
        counted = losses if mask is None else losses * mask.t()
        return None, {batch.tally: counted.sum(0)}
