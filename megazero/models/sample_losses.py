"""Chunks of a model that give the loss of each sample, or of each position, instead of the sum over all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megazero.errors import ConfigError
from megazero.layers.inputs import Deferred
from megazero.loss import LossTerm
from megazero.models.batch import Batch, M_contra
from megazero.models.chunk import ModelChunk
from megazero.models.language_model import LanguageModel, MeasuredModel
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

    def input_boundary(self, batch: M_contra) -> Boundary:
        """The hidden states between chunks, as `Trunk.input_boundary` says."""
        return self.chunk.input_boundary(batch)

    output_boundary = input_boundary

    def run(
        self, batch: M_contra, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> ChunkResult:
        """The hidden states for the next chunk; the last chunk gives the losses instead."""
        if self.chunk.head is None:
            return ChunkResult(self.chunk.hidden(batch, hidden))
        return ChunkResult(None, outputs={"losses": self._losses(batch, hidden)})

    def _losses(self, batch: M_contra, hidden: Tensor | None) -> Tensor:
        return self.chunk.sample_losses(batch, hidden)


@dataclass(frozen=True)
class PositionLosses(SampleLosses[Batch]):
    """A chunk of a language model; the last one's output ``losses`` has the result of `position_losses`."""

    chunk: LanguageModel

    @classmethod
    def of(cls, chunk: ModelChunk[Batch]) -> PositionLosses:
        """Wrap a chunk.

        Raises:
            ConfigError: its model does not predict each token from those before it.
        """
        if not isinstance(chunk, LanguageModel):
            raise ConfigError(
                f"the model must be a language model, but is a {type(chunk).__name__}, whose loss does not "
                "depend on how much text is before a position; measure its samples"
            )
        return cls(chunk)

    def _losses(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        return self.chunk.position_losses(batch, hidden)
