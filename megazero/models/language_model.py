"""The interfaces of models for inference: losses of samples and positions, and generation."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from megazero.models.batch import Batch, M_contra
from megazero.models.bert_batch import BertBatch
from megazero.models.trunk import Trunk


class MeasuredModel(Trunk[M_contra]):
    """A chunk of a model that can compute the loss of each sample."""

    @abstractmethod
    def sample_losses(self, batch: M_contra, hidden: Tensor | None = None) -> Tensor:
        """The summed loss of each sample in nats, float32 [b].

        Called on the chunk with the head, with the hidden states of the previous chunk.
        """


class LanguageModel(MeasuredModel[Batch]):
    """A chunk of a model that can generate text: its head maps [s, b, h] to logits [s, b, v/tp]."""

    @abstractmethod
    def position_losses(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """The weighted loss of each position in nats, float32 [s, b].

        Called on the chunk with the head, with the hidden states of the previous chunk.
        """

    def sample_losses(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """The summed loss of each sample in nats, float32 [b]."""
        return self.position_losses(batch, hidden).sum(0)

    @staticmethod
    def of(chunk: nn.Module) -> LanguageModel:
        """Return the chunk as the `LanguageModel` that it must be."""
        assert isinstance(chunk, LanguageModel), "this family's models generate text"
        return chunk

    @abstractmethod
    def without_sequence_parallelism(self) -> LanguageModel:
        """Return a model that shares these weights and has all positions on every rank.

        During generation a sequence is one token long and cannot be split over the tensor-parallel ranks.
        """


class MaskedLanguageModel(MeasuredModel[BertBatch]):
    """A chunk of a model that predicts masked tokens.

    Its head returns logits [m, 1, v/tp] of the masked tokens, and those of the order of segments.
    """

    @staticmethod
    def of(chunk: nn.Module) -> MaskedLanguageModel:
        """Return the chunk as the `MaskedLanguageModel` that it must be."""
        assert isinstance(chunk, MaskedLanguageModel), "this family's models predict masked tokens"
        return chunk
