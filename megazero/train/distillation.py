"""What a model learns from a teacher, and when the lessons end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megazero.config.distillation import DistillationConfig
from megazero.config.steps import Progress
from megazero.models import DistilledChunk, MicroBatch, ModelChunk
from megazero.pipeline.chunk import Chunk


@dataclass(frozen=True)
class Teacher:
    """A trained model on this rank.

    Attributes:
        chunks: this rank's parts of it, by the numbers of the student's.
        flops_per_token: FLOPs of its forward pass.
        folder: its checkpoint.
    """

    chunks: Mapping[int, ModelChunk[MicroBatch]]
    flops_per_token: float
    folder: Path


@dataclass
class Distillation:
    """What a step's chunks learn from a teacher, until the lessons end.

    Attributes:
        taught: the chunks that learn, by number; empty without a teacher or once the lessons are over.
        until: the step before which they end; None for never.
        flops_per_token: FLOPs that the teacher adds to the training on one token.
        remarks: what a person should know about it.
    """

    distilled: dict[int, DistilledChunk] = field(default_factory=dict)
    until: int | None = None
    flops_per_token: float = 0.0
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        settings: DistillationConfig,
        chunks: Mapping[int, ModelChunk[MicroBatch]],
        teacher: Teacher | None,
    ) -> Distillation:
        """The lessons of these chunks; none without a teacher."""
        if teacher is None:
            return cls()
        beta, temperature, until = settings.kd_beta_ce, settings.kd_temp, settings.kd_train_iters
        distilled = {
            number: DistilledChunk.of(chunk, teacher.chunks[number], beta, temperature)
            for number, chunk in chunks.items()
        }
        end = "" if until is None else f" until step {until}"
        return cls(distilled, until, teacher.flops_per_token, (f"learns from {teacher.folder}{end}",))

    def before(self, progress: Progress) -> None:
        """End the lessons if the step that follows is past them, and let go of the teacher's memory."""
        if self.distilled and self.until is not None and progress.iteration >= self.until:
            for chunk in self.distilled.values():
                chunk.teacher = None
            self.distilled, self.flops_per_token = {}, 0.0

    def beside(self, chunks: Mapping[int, ModelChunk[MicroBatch]]) -> Mapping[int, Chunk[MicroBatch]]:
        """What the executor runs: the chunks that learn, or these if there is no teacher."""
        # A student takes the batches that its own chunk would take.
        distilled: dict[int, Chunk[Any]] = {**self.distilled}
        return distilled or chunks
