"""`DistilledChunk`: a student's chunk and its teacher's (knowledge distillation, Hinton et al. 2015)."""

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
    """A student's chunk and the teacher's chunk of the same pipeline stage.

    Both read the same micro-batch; one message has the hidden states of both, [s, b, h student + h teacher].
    The last chunk adds the term ``kd``, the sum of KL(teacher || student) over positions with a loss. Its
    coefficient is beta times the square of the temperature, which makes the size of gradients independent of
    the temperature, as in Megatron-DeepSpeed's mixture of students (Rajbhandari et al. 2022).

    The teacher has no gradients and no dropout. Evaluation does not run it.

    Attributes:
        student: the chunk that is trained.
        teacher: the teacher's chunk; None once distillation has ended.
        beta: weight of the divergence.
        temperature: divisor of both models' logits.
    """

    student: GPT
    teacher: GPT | None
    beta: float
    temperature: float

    @classmethod
    def of(cls, student: nn.Module, teacher: nn.Module, beta: float, temperature: float) -> DistilledChunk:
        """Pair a student's chunk with its teacher's; rules refuse models other than GPT."""
        assert isinstance(student, GPT), "a student must be a GPT"
        assert isinstance(teacher, GPT), "a teacher must be a GPT"
        return cls(student, teacher, beta, temperature)

    @property
    def terms(self) -> tuple[LossTerm, ...]:
        """The student's loss terms, then the divergence."""
        if self.teacher is None:
            return self.student.terms
        weight = self.beta * self.temperature**2
        return (*self.student.terms, LossTerm(TERM, weight, over="lm", evaluated=False))

    def input_boundary(self, batch: Batch) -> Boundary:
        """[s, b, h student + h teacher] ([s/tp, ...] under sequence parallelism), in a dtype that holds both
        exactly; in evaluation the student's alone.
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
        """Run both chunks; the result is the student's, as that of `GPT.run`, with the divergence."""
        teacher = self._teaching()
        if teacher is None:
            return self.student.run(batch, hidden, deferred=deferred)
        student_hidden = teacher_hidden = None
        if hidden is not None:
            width = self.student.spec.stream.width
            student_hidden = hidden[..., :width].to(self.student.hidden_dtype)
            teacher_hidden = hidden.detach()[..., width:].to(teacher.hidden_dtype)
        student_hidden, sums = self.student.through(batch, student_hidden, deferred=deferred)
        teacher_output = _teacher_output(teacher, batch, teacher_hidden)
        if self.student.head is None:
            dtype = self.output_boundary(batch).dtype
            both = torch.cat([student_hidden.to(dtype), teacher_output.to(dtype)], -1)
            return ChunkResult(both, sums.terms, sums.tallies)
        logits: Tensor = self.student.head(student_hidden, deferred)
        part = self.student.slice_of(logits)
        divergences = vocab_parallel_kl_divergence(logits, teacher_output, part, self.temperature)
        divergence = batch.learnt.weighted(divergences).sum()
        losses = {**self.student.losses(logits, batch), TERM: divergence}
        return ChunkResult(None, {**sums.terms, **losses}, sums.tallies)

    def _teaching(self) -> GPT | None:
        return self.teacher if torch.is_grad_enabled() else None


@torch.no_grad()
def _teacher_output(teacher: GPT, batch: Batch, hidden: Tensor | None) -> Tensor:
    """The hidden states after the teacher's chunk, or its logits if the chunk has the head."""
    # Without keys of random streams there is no dropout.
    quiet = replace(batch, places=replace(batch.places, sample_keys=None), skipping=NOTHING_SKIPPED)
    output: Tensor = teacher.hidden(quiet, hidden) if teacher.head is None else teacher(quiet, hidden)
    return output
