"""`SampleLosses`: a chunk of a model that gives the loss of each sample instead of the sum over all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megazero.errors import ConfigError
from megazero.layers.inputs import Deferred
from megazero.loss import LossTerm
from megazero.models.batch import M_contra
from megazero.models.chunk import ModelChunk
from megazero.models.language_model import MeasuredModel
from megazero.pipeline.chunk import Boundary, Chunk, ChunkResult


@dataclass(frozen=True)
class SampleLosses(Chunk[M_contra]):
    """A chunk of a model, for evaluation of micro-batches with a sample in each row.

    The last chunk's output ``losses`` has the result of `sample_losses`; it adds to no loss term.
    """

    chunk: MeasuredModel[M_contra]
    terms: ClassVar[tuple[LossTerm, ...]] = ()

    @classmethod
    def of(cls, chunk: ModelChunk[M_contra]) -> SampleLosses[M_contra]:
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

    def takes(self, batch: M_contra) -> Boundary:
        """The hidden states between chunks, as `Trunk.takes` says."""
        return self.chunk.takes(batch)

    gives = takes

    def run(
        self, batch: M_contra, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> ChunkResult:
        """The hidden states for the next chunk; the last chunk gives the losses instead."""
        if self.chunk.head is None:
            return ChunkResult(self.chunk.hidden(batch, hidden))
        return ChunkResult(None, outputs={"losses": self.chunk.sample_losses(batch, hidden)})
