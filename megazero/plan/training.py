"""A whole training on paper: its parameters, its tokens, and how long all of its steps take."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.models.chunk import WORD
from megazero.mpu.context import solo_context
from megazero.optim.build import build_update_rule
from megazero.plan.job import Job
from megazero.plan.times import StepTimes
from megazero.spec.resolve import model_spec
from megazero.train.parts.chunks import parameter_counts
from megazero.train.parts.families import family_of

_FP32 = 4


@dataclass(frozen=True)
class Model:
    """The model of a job, whatever its layout.

    Attributes:
        parameters: the number of its weights; a weight that is tied counts once.
        forward_flops: for a token, of its matrix products and of attention to all positions.
        checkpoint_bytes: of a checkpoint: weights in fp32, and the optimizer's state.
    """

    parameters: int
    forward_flops: float
    checkpoint_bytes: int

    @classmethod
    def of(cls, job: Job) -> Model:
        """The model of a job."""
        family = family_of(job.config.model)
        blocks = family.models.blocks(job.config, job.vocabulary.padded)
        counts = dict(
            zip(
                (block.part for block in blocks),
                parameter_counts(job.config, job.vocabulary, solo_context("meta")),
                strict=True,
            )
        )
        words = [tie for tie in family.models.ties(model_spec(job.config.model)) if tie.weight == WORD]
        tied = sum(len(tie.parts) - 1 for tie in words)
        parameters = int(sum(counts.values())) - tied * job.vocabulary.padded * job.config.model.hidden_size
        kinds = 1 + len(build_update_rule(job.config.optimizer).state_names)
        flops = sum(block.flops for block in blocks)
        return cls(parameters, flops, parameters * kinds * _FP32)

    def step_flops(self, job: Job) -> float:
        """FLOPs of a step's forward and backward, of which recomputation is no part."""
        return 3 * self.forward_flops * job.step.positions


def training_seconds(job: Job, times: StepTimes) -> float:
    """The time of all steps: each takes as long as its number of micro-batches and of tokens says.

    A step is taken to have a time of its own, for bubble and update, and one for each micro-batch of the
    busiest stage, which is shorter as its rows are.
    """
    end, planned = job.training_plan.end.iteration, job.step
    own = max(times.timeline.busy) / planned.micro_batches
    fixed = times.seconds - own * planned.micro_batches
    segments = job.training_plan.steps.segments
    ends = [*(step.before.iteration for step in segments[1:]), end]
    total = 0.0
    for step, until in zip(segments, ends, strict=True):
        rows = step.rows * step.sequence_length / (planned.rows * planned.sequence_length)
        steps = max(0, min(until, end) - step.before.iteration)
        total += steps * (fixed + own * step.micro_batches * rows)
    return total
