"""`Plan`: the traced stages of a job, from which memory, traffic and times follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from megazero.mpu.context import solo_context
from megazero.plan.job import PlannedJob
from megazero.plan.stage import StagePlan
from megazero.plan.trace import trace_rank
from megazero.train.parts.chunks import assign_parts
from megazero.train.parts.families import family_of

Say = Callable[[str], None] | None
"""Who is told of progress, a line at a time; None for nobody."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of a job.

    Attributes:
        job: the job.
        stages: the pipeline stages, in order.
    """

    job: PlannedJob
    stages: tuple[StagePlan, ...]

    @classmethod
    def of(cls, job: PlannedJob, *, timed: bool = False, say: Say = None) -> Plan:
        """Trace a rank of each kind of stage; `timed` as for `trace_rank`, `say` gets a line for each kind.

        Raises:
            ConfigError: the model cannot be built on the job's ranks.
        """
        stages: dict[int, StagePlan] = {}
        kinds = stages_alike(job)
        for number, alike in enumerate(kinds, 1):
            trace = trace_rank(job, job.line[alike[0]], timed=timed)
            if say is not None:
                say(f"traced {number} of {len(kinds)} kinds of stages")
            stages |= {stage: StagePlan(stage, job.line, trace, job.program) for stage in alike}
        return cls(job, tuple(stages[stage] for stage in sorted(stages)))

    @cached_property
    def fullest(self) -> StagePlan:
        """The stage whose ranks need the most memory on the device."""
        return max(self.stages, key=lambda stage: stage.device_bytes)


def stages_alike(job: PlannedJob) -> list[list[int]]:
    """Group the stages of a job that hold the same kinds of parts of the model."""
    family, schedule = family_of(job.config.model), job.program.schedule
    blocks = {
        b.part: (b.kind, b.flops, b.own) for b in family.models.blocks(job.config, job.vocabulary.padded)
    }
    assigned = assign_parts(job.config, job.vocabulary, solo_context("meta"))
    alike: dict[tuple[object, ...], list[int]] = {}
    for stage in range(schedule.stages):
        parts = tuple(tuple(blocks[part] for part in assigned[chunk]) for chunk in schedule.chunks_of(stage))
        alike.setdefault(parts, []).append(stage)
    return list(alike.values())
