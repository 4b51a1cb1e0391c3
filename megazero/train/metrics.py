"""What one step and one evaluation report: plain values, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepMetrics:
    """One training iteration, as monitors see it.

    Attributes:
        iteration: number of this iteration, from 1.
        consumed_samples: sequences consumed by this and all earlier iterations.
        consumed_tokens: tokens consumed by this and all earlier iterations.
        lm_loss: mean loss per counted token of the global batch, nats.
        grad_norm: global gradient norm before clipping, unscaled; inf or NaN where the step was skipped.
        learning_rate: the rate this update used.
        loss_scale: the scale this step used.
        skipped: whether the update was left out because of non-finite gradients.
        seconds: wall time of the iteration.
        tokens_per_second: of all ranks together.
        tflops: model TFLOP/s of one rank; `flops.py` says what counts.
        matmul_share: `tflops` as a share of the rank's measured matmul rate, 0 to 1.
        global_batch_size: sequences of this iteration.
        num_micro_batches: forward passes per replica.
        params_norm: norm of the parameters after the update, if asked for.
        num_zeros: zero elements of the gradient, if asked for.
        first_bad_parameter: global name of the first parameter with a non-finite gradient.
        phase_seconds: wall time of each named phase (`timers.py`).
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    lm_loss: float
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


@dataclass(frozen=True)
class EvalMetrics:
    """One evaluation of one split.

    Attributes:
        iteration: training iterations done before it.
        split: `validation` or `test`.
        lm_loss: mean loss per counted token, nats.
        consumed_samples: training sequences consumed before it.
        consumed_tokens: training tokens consumed before it.
        num_tokens: counted tokens it averaged over.
        seconds: wall time.
    """

    iteration: int
    split: str
    lm_loss: float
    consumed_samples: int
    consumed_tokens: int
    num_tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss), with the loss capped at 20 as in Megatron so that it stays readable."""
        return math.exp(min(self.lm_loss, 20.0))  # in this order, min keeps a NaN
