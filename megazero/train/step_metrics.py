"""From what a step did to what monitors see of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero.config.steps import Step
from megazero.train.engine import StepResult
from megazero.train.metrics import StepMetrics
from megazero.train.run_plan import RunPlan
from megazero.train.state import TrainState


def step_metrics(
    plan: RunPlan,
    state: TrainState,
    result: StepResult,
    step: Step,
    seconds: float,
    flops_per_token: float,
    extras: Mapping[str, Any],
) -> StepMetrics:
    """The metrics of one training step.

    Args:
        plan: what the run does.
        state: how far it has got, this step included.
        result: what the step did.
        step: what it consumed.
        seconds: its wall time.
        flops_per_token: this rank's share of the FLOPs for a token.
        extras: further fields.
    """
    rate = step.positions / seconds
    # Padding takes time only where it cannot be avoided, and is no use.
    flops = rate * (1.0 - result.losses.padding) * flops_per_token
    return StepMetrics(
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
        sequence_length=step.sequence_length if plan.horizon.steps.lengths.grow else None,
        difficulties=plan.difficulties.at(step.before) if plan.difficulties else None,
        kept_tokens=step.kept_tokens,
        layers_run=result.skipping.layers_run,
        **_steadiness(state, result),
        **extras,
    )


def _steadiness(state: TrainState, result: StepResult) -> dict[str, float | None]:
    """The metrics of `state.stability` after a step that made an update."""
    found = state.stability
    if found is None or result.skipped or not found.updates:
        return {}
    return {
        "loss_ratio": found.loss_ratio,
        "loss_deviation": found.loss.deviation,
        "grad_norm_deviation": found.grad_norm.deviation,
    }
