"""The plan of a whole training: its parameters, its FLOPs, and the time of all steps."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.models.chunk import WORD
from megazero.mpu.context import solo_context
from megazero.optim.build import build_update_rule
from megazero.plan.job import PlannedJob
from megazero.plan.times import StepTimes
from megazero.spec.resolve import model_spec
from megazero.train.parts.chunks import parameter_counts
from megazero.train.parts.families import family_of

_FP32 = 4


@dataclass(frozen=True)
class Model:
    """The model of a job, which is the same in all layouts.

    Attributes:
        parameters: the number of weights; a tied weight counts once.
        forward_flops: FLOPs of a token's forward pass: matrix products, and attention to all positions.
        checkpoint_bytes: the size of a checkpoint: fp32 weights, and the optimizer's state.
    """

    parameters: int
    forward_flops: float
    checkpoint_bytes: int

    @classmethod
    def of(cls, job: PlannedJob) -> Model:
        """Count the model of a job."""
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

    def step_flops(self, job: PlannedJob) -> float:
        """FLOPs of a step's forward and backward, without recomputation."""
        return 3 * self.forward_flops * job.step.positions


def training_seconds(job: PlannedJob, times: StepTimes) -> float:
    """The seconds of all steps, whose batch sizes and sequence lengths may differ.

    A step is modelled as a constant, for bubble and update, and a time per micro-batch of the busiest stage,
    which is proportional to the micro-batch's tokens.
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
