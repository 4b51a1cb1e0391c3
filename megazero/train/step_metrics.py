"""From the result of a step to its metrics for monitors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from megazero.config.steps import Step
from megazero.train.engine import StepResult
from megazero.train.metrics import StepMetrics
from megazero.train.run_plan import RunPlan
from megazero.train.state import TrainState


class StepExtras(TypedDict, total=False):
    """Fields of `StepMetrics` that take communication, or that not every step has."""

    params_norm: float | None
    num_zeros: int | None
    phase_seconds: Mapping[str, float]
    tokens_per_expert: Sequence[Mapping[str, Any]] | None
    rank_seconds: Mapping[str, Sequence[float]] | None
    offload: Mapping[str, float] | None
    memory: Sequence[Mapping[str, Mapping[str, int]]] | None


def step_metrics(
    plan: RunPlan,
    state: TrainState,
    result: StepResult,
    step: Step,
    seconds: float,
    flops_per_token: float,
    extras: StepExtras,
) -> StepMetrics:
    """The metrics of one training step.

    Args:
        plan: the plan of the run.
        state: the progress of the run, this step included.
        result: the result of the step.
        step: the samples that it consumed.
        seconds: its wall time.
        flops_per_token: this rank's share of the FLOPs for a token.
        extras: further fields.
    """
    rate = step.positions / seconds
    # Padding takes time only where it cannot be avoided, and is no use.
    flops = rate * (1.0 - result.losses.padding) * flops_per_token
    metrics = StepMetrics(
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        consumed_tokens=state.consumed_tokens,
        losses=result.losses,
        grad_norm=result.grad_norm,
        learning_rate=result.learning_rate,
        loss_scale=result.loss_scale,
        skipped=result.skipped,
        seconds=seconds,
        tokens_per_second=rate,
        tflops=flops / 1e12,
        matmul_share=flops / plan.matmul_rate,
        global_batch_size=step.batch_size,
        num_micro_batches=step.micro_batches,
        first_bad_parameter=result.first_bad_parameter,
        sequence_length=step.sequence_length if plan.training_plan.steps.lengths.grow else None,
        difficulties=plan.difficulties.at(step.before) if plan.difficulties else None,
        kept_tokens=step.kept_tokens,
        layers_run=result.skipping.layers_run,
        **extras,
    )
    stability = state.stability
    if stability is None or result.skipped or not stability.updates:
        return metrics
    return replace(
        metrics,
        loss_ratio=stability.loss_ratio,
        loss_deviation=stability.loss.deviation,
        grad_norm_deviation=stability.grad_norm.deviation,
    )
