"""`Plan`: all stages of a job on paper, and what follows: does it fit, how much moves, how long is a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megazero.plan.job import Job
from megazero.plan.stage import StagePlan
from megazero.plan.times import Prices, StepTimes
from megazero.plan.trace import trace_rank


@dataclass(frozen=True, eq=False)
class Plan:
    """A job on paper.

    Attributes:
        job: the job.
        stages: its stages, in order.
    """

    job: Job
    stages: tuple[StagePlan, ...]

    @classmethod
    def of(cls, job: Job) -> Plan:
        """Trace a rank of each kind of stage.

        Raises:
            ConfigError: the model cannot be built on so many ranks.
        """
        stages: dict[int, StagePlan] = {}
        for alike in job.alike.values():
            trace = trace_rank(job, job.line[alike[0]])
            stages |= {stage: StagePlan(stage, job.line, trace, job.program) for stage in alike}
        return cls(job, tuple(stages[stage] for stage in sorted(stages)))

    @cached_property
    def fullest(self) -> StagePlan:
        """The stage whose ranks need most memory on the device."""
        return max(self.stages, key=lambda stage: stage.device_bytes)

    def times(self, prices: Prices) -> StepTimes:
        """The times of a step at these prices."""
        return StepTimes.of(self.stages, prices)
