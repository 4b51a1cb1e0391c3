"""Metrics with handy defaults."""

from __future__ import annotations

from megazero.config.steps import Progress
from megazero.loss import LossTerm
from megazero.train.observe.metrics import EvalMetrics, StepMetrics
from megazero.train.step.losses import Losses


def only_lm(loss: float | None) -> Losses:
    """The losses of a GPT."""
    return Losses((LossTerm("lm"),), (loss,))


def step(iteration: int = 1, lm_loss: float | None = 4.0, **fields) -> StepMetrics:
    values = {
        "consumed_samples": 8 * iteration,
        "consumed_tokens": 512 * iteration,
        "grad_norm": 1.5,
        "learning_rate": 3e-4,
        "loss_scale": 1.0,
        "skipped": False,
        "seconds": 0.5,
        "tokens_per_second": 1024.0,
        "tflops": 0.25,
        "matmul_share": 0.3,
        "global_batch_size": 8,
        "num_micro_batches": 2,
    }
    return StepMetrics(iteration=iteration, **{**values, "losses": only_lm(lm_loss), **fields})


def evaluation(iteration: int = 10, lm_loss: float | None = 2.0, **fields) -> EvalMetrics:
    values = {"split": "validation", "losses": only_lm(lm_loss), "num_tokens": 640, "seconds": 1.0}
    return EvalMetrics(Progress(iteration, 8 * iteration, 512 * iteration), **{**values, **fields})
