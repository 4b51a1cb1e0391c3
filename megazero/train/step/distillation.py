"""Distillation: a model that learns from a teacher, and the step at which that ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megazero.config.steps import Progress
from megazero.config.tree.distillation import DistillationConfig
from megazero.models.batch import MicroBatch
from megazero.models.chunk import ModelChunk
from megazero.models.distilled import DistilledChunk
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
    """The chunks that learn from a teacher, until distillation ends.

    Attributes:
        distilled: the chunks that learn, by number; empty without a teacher or once distillation has ended.
        until: the number of steps after which it ends; None for never.
        flops_per_token: FLOPs that the teacher adds to the training on one token.
        remarks: lines for a person.
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
        """Put the chunks beside their teacher's, if there is one."""
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
        """End distillation if the next step is past its end, and free the teacher's memory."""
        if self.distilled and self.until is not None and progress.iteration >= self.until:
            for chunk in self.distilled.values():
                chunk.teacher = None
            self.distilled, self.flops_per_token = {}, 0.0

    def beside(self, chunks: Mapping[int, ModelChunk[MicroBatch]]) -> Mapping[int, Chunk[MicroBatch]]:
        """The chunks that the executor runs: those that learn, or `chunks` if there is no teacher."""
        # A student takes the batches that its own chunk would take.
        distilled: dict[int, Chunk[Any]] = {**self.distilled}
        return distilled or chunks
