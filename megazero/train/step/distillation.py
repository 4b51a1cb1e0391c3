"""Knowledge distillation: the student's and the teacher's chunks, and the step after which it ends."""

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
        chunks: number of a student's chunk -> the teacher's chunk of the same place in the pipeline.
        flops_per_token: FLOPs of its forward pass.
        folder: its checkpoint.
    """

    chunks: Mapping[int, ModelChunk[MicroBatch]]
    flops_per_token: float
    folder: Path


@dataclass
class Distillation:
    """The distilled chunks of this rank, until distillation ends.

    Attributes:
        distilled: number -> chunk; empty without a teacher, or once distillation has ended.
        until: the number of steps after which it ends; None for never.
        flops_per_token: FLOPs of the teacher per token.
        remarks: remarks for a person.
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
        """Pair the chunks with their teacher's, if there is one."""
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
        """End distillation, and free the teacher's memory, if the next step is past its end."""
        if self.distilled and self.until is not None and progress.iteration >= self.until:
            for chunk in self.distilled.values():
                chunk.teacher = None
            self.distilled, self.flops_per_token = {}, 0.0

    def beside(self, chunks: Mapping[int, ModelChunk[MicroBatch]]) -> Mapping[int, Chunk[MicroBatch]]:
        """The chunks that the executor runs: the distilled ones, or `chunks` without a teacher."""
        # `Any`, because a distilled chunk reads the same batches as the student's chunk.
        distilled: dict[int, Chunk[Any]] = {**self.distilled}
        return distilled or chunks
