"""Kinds of models, by what they can do besides training."""

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
        """The loss of each sample, summed over the positions that count, in nats, float32 [b].

        Only the chunk with the head has it, from the hidden states of the previous chunk.
        """


class LanguageModel(MeasuredModel[Batch]):
    """A chunk of a model that can continue text, as generation runs it.

    Its head gives logits [s, b, v/tp] of hidden states [s, b, h].
    """

    @abstractmethod
    def position_losses(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """The loss of each position in nats, 0 where it does not count, float32 [s, b].

        Only the chunk with the head has it, from the hidden states of the previous chunk.
        """

    def sample_losses(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """The loss of each sample, summed over the positions that count, in nats, float32 [b]."""
        return self.position_losses(batch, hidden).sum(0)

    @staticmethod
    def of(chunk: nn.Module) -> LanguageModel:
        """Return the chunk, which must be one of such a model."""
        assert isinstance(chunk, LanguageModel), "this family's models continue text"
        return chunk

    @abstractmethod
    def without_sequence_parallelism(self) -> LanguageModel:
        """The same weights, in the same memory, in a model that holds all positions on every rank.

        During generation a sequence is one token long and cannot be split over the tensor-parallel ranks.
        """


class MaskedLanguageModel(MeasuredModel[BertBatch]):
    """A chunk of a model that can restore masked tokens.

    Its head gives logits [m, 1, v/tp] of the batch's masked places, and those of the samples' order.
    """

    @staticmethod
    def of(chunk: nn.Module) -> MaskedLanguageModel:
        """Return the chunk, which must be one of such a model."""
        assert isinstance(chunk, MaskedLanguageModel), "this family's models restore masked tokens"
        return chunk
