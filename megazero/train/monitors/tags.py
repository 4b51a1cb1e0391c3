"""The names under which charts hold values: Megatron's, so that old and new runs share a chart."""

from __future__ import annotations

from megazero.train.metrics import EvalMetrics, StepMetrics


def step_values(metrics: StepMetrics, *, with_timers: bool) -> dict[str, float]:
    """Tag -> value of one iteration."""
    values = {
        "learning-rate": metrics.learning_rate,
        "batch-size": float(metrics.global_batch_size),
        "loss-scale": metrics.loss_scale,
        "grad-norm": metrics.grad_norm,
        "iteration-time": metrics.seconds,
        "throughput": metrics.tflops,
        "tokens-per-second": metrics.tokens_per_second,
        "matmul-share": metrics.matmul_share,
        "skipped-iterations": float(metrics.skipped),
    }
    if not metrics.skipped:
        values["lm loss"] = metrics.lm_loss
    if metrics.num_zeros is not None:
        values["num-zeros"] = float(metrics.num_zeros)
    if metrics.params_norm is not None:
        values["params-norm"] = metrics.params_norm
    if with_timers:
        values |= {f"{name}-time": seconds for name, seconds in metrics.phase_seconds.items()}
    return values


# The tags that are also drawn over consumed samples.
OVER_SAMPLES = (
    "lm loss",
    "learning-rate",
    "batch-size",
    "loss-scale",
    "grad-norm",
    "num-zeros",
    "params-norm",
)


def evaluation_values(metrics: EvalMetrics, *, with_perplexity: bool) -> dict[str, float]:
    """Tag -> value of one evaluation, such as ``lm loss validation``."""
    values = {f"lm loss {metrics.split}": metrics.lm_loss}
    if with_perplexity:
        values[f"lm loss {metrics.split} ppl"] = metrics.perplexity
    return values
