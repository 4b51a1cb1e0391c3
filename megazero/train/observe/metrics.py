"""The metrics of one step and of one evaluation: plain values, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypedDict

from megazero.config.steps import Step
from megazero.train.run_plan import RunPlan
from megazero.train.step.engine import StepResult
from megazero.train.step.losses import Losses
from megazero.train.step.state import TrainState

STABILITY = ("loss_ratio", "loss_deviation", "grad_norm_deviation")
"""The fields of `StepMetrics` that say how steady the training is."""

_WHERE_KNOWN = (
    "tokens_per_expert",
    "sequence_length",
    "difficulties",
    "kept_tokens",
    "layers_run",
    "rank_seconds",
    "offload",
    "memory",
    *STABILITY,
)


@dataclass(frozen=True)
class StepMetrics:
    """One training iteration, as monitors see it.

    Attributes:
        iteration: number of this iteration, from 1.
        consumed_samples: sequences consumed by this and all earlier iterations.
        consumed_tokens: tokens consumed by this and all earlier iterations.
        losses: losses on the global batch, by term.
        grad_norm: global gradient norm before clipping, unscaled; inf or NaN if that caused the step to be
            skipped.
        learning_rate: the learning rate of this update.
        loss_scale: the loss scale of this step.
        skipped: whether the update was skipped: because of non-finite gradients, or because nothing in the
            global batch counted (`losses.total` is None).
        seconds: wall time of the iteration.
        tokens_per_second: throughput of all ranks together, padding and what layers skip included.
        tflops: model TFLOP/s of one rank, padding and what was skipped left out; `models/flops.py` says what
            counts.
        matmul_share: `tflops` as a share of the rank's measured matmul rate, 0 to 1.
        global_batch_size: number of sequences in this iteration.
        num_micro_batches: forward passes per replica.
        params_norm: norm of the parameters after the update, if asked for.
        num_zeros: zero elements of the gradient, if asked for.
        first_bad_parameter: global name of the first parameter with a non-finite gradient.
        phase_seconds: wall time of each named phase (`timers.py`).
        sequence_length: tokens of a sequence in this iteration; None without a curriculum.
        difficulties: for each metric of a curriculum over samples, how difficult those of this iteration
            may be; None without one.
        kept_tokens: tokens of a sequence that layers with random-LTD saw; None where they saw all.
        layers_run: how many layers ran; None without progressive layer dropping.
        loss_ratio: the total loss as a multiple of the lowest of the updates before (`stability.py`); like
            the next two, None unless asked for, and in a skipped step.
        loss_deviation, grad_norm_deviation: standard deviation over recent updates, this one included.
        tokens_per_expert: for each layer with experts, its number as ``layer``, and as ``tokens`` how often
            each of its experts was chosen in this iteration, before any token was dropped. None in between
            the iterations that are logged, and without experts.
        rank_seconds: minimum, median and maximum over ranks of the seconds per step that each takes itself,
            as ``own``, and those that it waits, as ``waited``; in the iteration after an interval over which
            ranks were compared (`stragglers.py`).
        offload: what this rank moved to and from offloaded state: ``read`` and ``written``, bytes, and
            ``waited``, seconds in which the step did nothing else. None where nothing is offloaded.
        memory: for each rank, bytes by place (``device``, ``cpu``, ``nvme``) and by what they hold (see
            `memory.py`); in the first iteration of a run, and only where metrics go to a file.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    losses: Losses
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    seconds: float
    tokens_per_second: float
    tflops: float
    matmul_share: float
    global_batch_size: int
    num_micro_batches: int
    params_norm: float | None = None
    num_zeros: int | None = None
    first_bad_parameter: str | None = None
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    sequence_length: int | None = None
    difficulties: Mapping[str, int] | None = None
    kept_tokens: int | None = None
    layers_run: int | None = None
    loss_ratio: float | None = None
    loss_deviation: float | None = None
    grad_norm_deviation: float | None = None
    tokens_per_expert: Sequence[Mapping[str, Any]] | None = None
    rank_seconds: Mapping[str, Sequence[float]] | None = None
    offload: Mapping[str, float] | None = None
    memory: Sequence[Mapping[str, Mapping[str, int]]] | None = None

    @property
    def expert_loads(self) -> tuple[float, float] | None:
        """The loads of the idlest and the busiest expert of all, as multiples of an even share."""
        if not self.tokens_per_expert:
            return None
        layers = [layer["tokens"] for layer in self.tokens_per_expert]
        loads = [count * len(tokens) / max(1, sum(tokens)) for tokens in layers for count in tokens]
        return min(loads), max(loads)

    def record(self) -> dict[str, object]:
        """Name -> value of every field, with every loss term in place of `losses`.

        Some fields are left out where they are None: tokens per expert, traffic of offloaded state, memory
        and stability where they are not known, the sequence length where it does not change, difficulties
        without a curriculum, and skipping where nothing can be skipped.
        """
        values = _record(self)
        for name in _WHERE_KNOWN:
            if values[name] is None:
                del values[name]
        return values


@dataclass(frozen=True)
class EvalMetrics:
    """One evaluation of one split.

    Attributes:
        iteration: training iterations done before it.
        split: `validation` or `test`.
        losses: losses on the batches, by term.
        consumed_samples: training sequences consumed before it.
        consumed_tokens: training tokens consumed before it.
        num_tokens: how much counted for the first term, such as the number of tokens that were not masked.
        seconds: wall time.
        predicts_text: whether the first term is the loss of a language model, which has a perplexity.
    """

    predicts_text: ClassVar[bool] = True

    iteration: int
    split: str
    losses: Losses
    consumed_samples: int
    consumed_tokens: int
    num_tokens: int
    seconds: float

    @property
    def perplexity(self) -> float | None:
        """exp(loss) for the first term; as in Megatron, the loss is capped at 20 to keep it readable."""
        loss = self.losses.main
        return None if loss is None else math.exp(min(loss, 20.0))  # in this order, min keeps a NaN

    def record(self) -> dict[str, object]:
        """Name -> value of every field, with every loss term in place of `losses`, and the perplexity."""
        return {**_record(self), "perplexity": self.perplexity}


def _record(metrics: StepMetrics | EvalMetrics) -> dict[str, object]:
    values: dict[str, object] = {}
    for attribute in fields(metrics):
        value = getattr(metrics, attribute.name)
        new = value.record() if isinstance(value, Losses) else {attribute.name: value}
        assert not values.keys() & new.keys(), f"a loss term has the name of a metric: {sorted(new)}"
        values |= new
    return values


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
