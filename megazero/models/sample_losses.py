"""`SampleLosses`: a chunk of a model that gives the loss of each sample instead of the sum over all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic

import torch
from torch import Tensor

from megazero.errors import ConfigError
from megazero.layers import Deferred
from megazero.loss import LossTerm
from megazero.models.batch import M
from megazero.models.chunk import ModelChunk
from megazero.models.language_model import MeasuredModel
from megazero.pipeline.chunk import Chunk


@dataclass(frozen=True)
class NumberedBatch(Generic[M]):
    """A micro-batch, and its number in the step."""

    number: int
    batch: M

    @property
    def tally(self) -> str:
        """The name of the tally that its losses become."""
        return f"losses of micro-batch {self.number}"


@dataclass(frozen=True)
class SampleLosses(Chunk[NumberedBatch[M]]):
    """A chunk of a model, for evaluation; its batches are `NumberedBatch`, with a sample in each row.

    The last chunk adds the result of `sample_losses` to the tally of each micro-batch, and to no loss term.
    """

    chunk: MeasuredModel[M]
    terms: ClassVar[tuple[LossTerm, ...]] = ()

    @classmethod
    def of(cls, chunk: ModelChunk[M]) -> SampleLosses[M]:
        """Wrap a chunk.

        Raises:
            ConfigError: its model, such as a classifier, has no losses of single samples.
        """
        if not isinstance(chunk, MeasuredModel):
            raise ConfigError(
                f"the model must be one that is pretrained, but is a {type(chunk).__name__}, whose samples "
                "have no losses of their own; load the model from before fine-tuning"
            )
        return cls(chunk)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of the hidden states between chunks."""
        return self.chunk.hidden_dtype

    def hidden_shape(self, batch: NumberedBatch[M]) -> tuple[int, int, int]:
        """The shape of the hidden states between chunks, as `Trunk.hidden_shape` says."""
        return self.chunk.hidden_shape(batch.batch)

    def run(
        self, batch: NumberedBatch[M], hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The hidden states for the next chunk; the last chunk gives the losses instead."""
        if self.chunk.head is None:
            return self.chunk.hidden(batch.batch, hidden), {}
        return None, {batch.tally: self.chunk.sample_losses(batch.batch, hidden)}
