"""Kinds of models, by what they can do besides training."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from megazero.models.batch import Batch, M_contra
from megazero.models.trunk import Trunk


class MeasuredModel(Trunk[M_contra]):
    """A chunk of a model that can tell the loss of each sample."""

    @abstractmethod
    def sample_losses(self, batch: M_contra, hidden: Tensor | None = None) -> Tensor:
        """Of the chunk with the head: the summed loss of each sample over the positions that count, in nats,
        float32 [b], from the hidden states of the previous chunk.
        """


class LanguageModel(MeasuredModel[Batch]):
    """A chunk of a model that can continue text, as generation runs it.

    Its head gives logits [s, b, v/tp] of hidden states [s, b, h].
    """

    @abstractmethod
    def without_sequence_parallelism(self) -> LanguageModel:
        """The same weights, in the same memory, in a model that holds all positions on every rank.

        During generation a sequence is one token long and cannot be split over the tensor-parallel ranks.
        """
