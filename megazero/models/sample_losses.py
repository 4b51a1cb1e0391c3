"""Chunks whose output is the loss of each sample, or of each position, instead of the sum over all."""

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
    """A chunk of a model that evaluates micro-batches with one sample per row.

    The last chunk's output ``losses`` is the result of `sample_losses`. There are no loss terms.
    """

    chunk: MeasuredModel[M_contra]
    terms: ClassVar[tuple[LossTerm, ...]] = ()

    @classmethod
    def of(cls, chunk: ModelChunk[M_contra]) -> SampleLosses[M_contra]:
        """Wrap a chunk.

        Raises:
            ConfigError: the model, such as a classifier, cannot compute losses of single samples.
        """
        if not isinstance(chunk, MeasuredModel):
            raise ConfigError(
                f"the model must be one that is pretrained, but is a {type(chunk).__name__}, whose samples "
                "have no losses of their own; load the model from before fine-tuning"
            )
        return cls(chunk)

    def input_boundary(self, batch: M_contra) -> Boundary:
        """The boundary of the wrapped chunk."""
        return self.chunk.input_boundary(batch)

    output_boundary = input_boundary

    def run(
        self, batch: M_contra, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> ChunkResult:
        """Compute the hidden states for the next chunk, or in the last chunk the losses."""
        if self.chunk.head is None:
            return ChunkResult(self.chunk.hidden(batch, hidden))
        return ChunkResult(None, outputs={"losses": self._losses(batch, hidden)})

    def _losses(self, batch: M_contra, hidden: Tensor | None) -> Tensor:
        return self.chunk.sample_losses(batch, hidden)


@dataclass(frozen=True)
class PositionLosses(SampleLosses[Batch]):
    """A chunk of a language model; the last chunk's output ``losses`` is the result of `position_losses`."""

    chunk: LanguageModel

    @classmethod
    def of(cls, chunk: ModelChunk[Batch]) -> PositionLosses:
        """Wrap a chunk.

        Raises:
            ConfigError: the model does not predict each token from the tokens before it.
        """
        if not isinstance(chunk, LanguageModel):
            raise ConfigError(
                f"the model must be a language model, but is a {type(chunk).__name__}, whose loss does not "
                "depend on how much text is before a position; measure its samples"
            )
        return cls(chunk)

    def _losses(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        return self.chunk.position_losses(batch, hidden)
