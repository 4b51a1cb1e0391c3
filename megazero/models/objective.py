"""Objectives: what a run minimizes instead of the cross-entropy of each next token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from megazero.layers.collectives import reduce_from_slices, share_for_parts
from megazero.layers.inputs import Deferred
from megazero.loss import LossTerm
from megazero.models.batch import Batch
from megazero.models.gpt import GPT
from megazero.mpu.group import Group
from megazero.pipeline.chunk import Boundary, Chunk, ChunkResult

LOGS = "logs"
"""The output of an `ObjectiveChunk`: the log-probability of each label, float32 [s, b]."""


@dataclass(frozen=True)
class AnswerBatch(Batch):
    """Sequences of which some tokens are answers: those whose labels have a weight.

    Attributes:
        given: name -> what the objective knows beforehand, of each row [b], or of each label [b, s].
        divisors: name -> a divisor of loss terms. It counts whole sequences, or all of their columns.
    """

    given: Mapping[str, Tensor] = field(default_factory=dict)
    divisors: Mapping[str, float] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, float]:
        """The counts of text, and the divisors."""
        return {**super().counts, **self.divisors}

    def counts_of_share(self, sharers: int) -> dict[str, float]:
        """The counts of one of `sharers` ranks that share the sequences."""
        shared = {name: divisor / sharers for name, divisor in self.divisors.items()}
        return {**super().counts_of_share(sharers), **shared}


class LossChange(Protocol):
    """A loss that a run minimizes instead of its model's own."""

    def on_chunk(self, student: nn.Module) -> Chunk[Any]:
        """The chunk `student`, whose sums are of the other loss; rules refuse models that have none."""


class Objective(LossChange, Protocol):
    """A loss of sequences, by the log-probabilities of their labels."""

    def on_chunk(self, student: nn.Module) -> ObjectiveChunk:
        """Run a GPT's chunk, and hand the log-probability of each label to this objective."""
        return ObjectiveChunk.of(student, self)

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The loss terms. Of those over counts of whole sequences, see `__call__`."""

    def changed(self, logits: Tensor, batch: AnswerBatch, first: int) -> Tensor:
        """The logits [s, b, v/tp] of the distribution that is trained, such as one of another temperature.

        Args:
            logits: those of the model, which backward may not overwrite.
            first: the token of the first column.
        """
        return logits

    def __call__(self, logs: Tensor, batch: AnswerBatch, cp: Group) -> Mapping[str, Tensor]:
        """Each term's sum over the micro-batch, float32 scalars.

        Of a term that is no sum over tokens, each of the ranks `cp` that share the sequences returns its
        share, so that the shares add up to the term.

        Args:
            logs: log-probability of each label, float32 [s, b]; of this rank's columns alone.
            cp: the ranks that share the sequences (see `over_columns`).
        """


def over_columns(values: Tensor, cp: Group) -> Tensor:
    """Sum values [s, b] of this rank's columns over all columns: [b], the same on every rank of `cp`.

    Backward sums the gradients of all ranks, each of which contributes its share of the loss.
    """
    sums = values.sum(0)
    return sums if cp.size == 1 else share_for_parts(reduce_from_slices(sums, cp), cp)


@dataclass(frozen=True)
class ObjectiveChunk(Chunk[AnswerBatch]):
    """A chunk of a GPT that is trained with an objective; its output is `LOGS`.

    Attributes:
        student: the chunk that is trained.
        objective: replaces its loss of words.
    """

    student: GPT
    objective: Objective

    @classmethod
    def of(cls, student: nn.Module, objective: Objective) -> ObjectiveChunk:
        """Wrap a chunk; rules refuse models other than GPT."""
        assert isinstance(student, GPT), "an objective needs a GPT"
        return cls(student, objective)

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The objective's terms, then those of the routers."""
        own = self.student.own_terms
        return (*self.objective.terms, *(term for term in self.student.terms if term not in own))

    def input_boundary(self, batch: AnswerBatch) -> Boundary:
        """The boundary of the wrapped chunk."""
        return self.student.input_boundary(batch)

    output_boundary = input_boundary

    def run(
        self, batch: AnswerBatch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> ChunkResult:
        """Compute the hidden states for the next chunk, or in the last chunk the objective's terms."""
        student = self.student
        hidden, sums = student.through(batch, hidden, deferred=deferred)
        if student.head is None:
            return ChunkResult(hidden, sums.terms, sums.tallies)
        logits: Tensor = student.head(hidden, deferred)
        changed = self.objective.changed(logits, batch, student.slice_of(logits).start)
        logs = -student.token_losses(changed, batch.learnt.labels).loss
        terms = self.objective(logs, batch, student.placement.groups["cp"])
        return ChunkResult(None, {**sums.terms, **terms}, sums.tallies, {LOGS: logs.detach()})
