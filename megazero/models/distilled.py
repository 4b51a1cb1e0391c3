"""`DistilledChunk`: a chunk of a model that learns from another one (Hinton et al. 2015)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megazero.layers.inputs import NOTHING_SKIPPED, Deferred
from megazero.loss import LossTerm
from megazero.models.batch import Batch
from megazero.models.gpt import GPT
from megazero.ops.kl_divergence import vocab_parallel_kl_divergence
from megazero.pipeline.chunk import Boundary, Chunk, ChunkResult

TERM = "kd"


@dataclass
class DistilledChunk(Chunk[Batch]):
    """A chunk of a student beside the chunk of its teacher that computes at the same place of the pipeline.

    Both read the same micro-batch; their hidden states travel in one message, the student's columns first.
    The last chunk adds the sum of KL(teacher || student) over the positions that count to the term ``kd``.
    Its coefficient is beta times the square of the temperature, so that gradients keep their size whatever
    the temperature is, as in Megatron-DeepSpeed's mixture of students (Rajbhandari et al. 2022).

    The teacher gets no gradients and drops nothing. Evaluations do without it.

    Attributes:
        student: the chunk that is trained.
        teacher: the other chunk; None once distillation has ended.
        beta: weight of the divergence.
        temperature: divides the logits of both.
    """

    student: GPT
    teacher: GPT | None
    beta: float
    temperature: float

    @classmethod
    def of(cls, student: nn.Module, teacher: nn.Module, beta: float, temperature: float) -> DistilledChunk:
        """Put a chunk beside its teacher's; both are of language models, as rules refuse all others."""
        assert isinstance(student, GPT), "only language models are distilled"
        assert isinstance(teacher, GPT), "only language models teach"
        return cls(student, teacher, beta, temperature)

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The student's loss terms, then the divergence."""
        if self.teacher is None:
            return self.student.terms
        weight = self.beta * self.temperature**2
        return (*self.student.terms, LossTerm(TERM, weight, over="lm", evaluated=False))

    def input_boundary(self, batch: Batch) -> Boundary:
        """[s, b, h of the student + h of the teacher], the student's alone in evaluations; s/tp under
        sequence parallelism. The dtype holds both exactly.
        """
        (rows, b, width), dtype = self.student.input_boundary(batch)
        if self.teacher is not None:
            dtype = torch.promote_types(dtype, self.teacher.hidden_dtype)
        teacher = self._teaching()
        return Boundary((rows, b, width + (0 if teacher is None else teacher.spec.stream.width)), dtype)

    output_boundary = input_boundary

    def run(
        self, batch: Batch, hidden: Tensor | None = None, *, deferred: Deferred | None = None
    ) -> ChunkResult:
        """Do what `GPT.run` does, with the teacher's part beside it."""
        teacher = self._teaching()
        if teacher is None:
            return self.student.run(batch, hidden, deferred=deferred)
        mine = its = None
        if hidden is not None:
            width = self.student.spec.stream.width
            mine = hidden[..., :width].to(self.student.hidden_dtype)
            its = hidden.detach()[..., width:].to(teacher.hidden_dtype)
        mine, sums = self.student.through(batch, mine, deferred=deferred)
        its = _teacher_output(teacher, batch, its)
        if self.student.head is None:
            dtype = self.output_boundary(batch).dtype
            both = torch.cat([mine.to(dtype), its.to(dtype)], -1)
            return ChunkResult(both, sums.terms, sums.tallies)
        logits: Tensor = self.student.head(mine, deferred)
        losses = {**self.student.losses(logits, batch), TERM: self._divergence(logits, its, batch)}
        return ChunkResult(None, {**sums.terms, **losses}, sums.tallies)

    def _divergence(self, logits: Tensor, wanted: Tensor, batch: Batch) -> Tensor:
        """The sum over the positions that count, in nats."""
        part = self.student.slice_of(logits)
        divergences = vocab_parallel_kl_divergence(logits, wanted, part, self.temperature)
        return batch.learnt.weighted(divergences).sum()

    def _teaching(self) -> GPT | None:
        return self.teacher if torch.is_grad_enabled() else None


@torch.no_grad()
def _teacher_output(teacher: GPT, batch: Batch, hidden: Tensor | None) -> Tensor:
    """The teacher's hidden states after its part here, or its logits."""
    # Without keys of random streams, nothing is dropped.
    quiet = replace(batch, places=replace(batch.places, sample_keys=None), skipping=NOTHING_SKIPPED)
    output: Tensor = teacher.hidden(quiet, hidden) if teacher.head is None else teacher(quiet, hidden)
    return output
