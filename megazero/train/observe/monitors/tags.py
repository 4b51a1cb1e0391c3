"""The names of values in charts. They are Megatron's, so that old and new runs share a chart."""

from __future__ import annotations

from megazero.train.observe.metrics import STABILITY, EvalMetrics, StepMetrics


def step_values(metrics: StepMetrics, *, with_timers: bool) -> dict[str, float]:
    """Tag -> value for one iteration."""
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
        values |= _known(metrics.losses.labelled())
    if metrics.num_zeros is not None:
        values["num-zeros"] = float(metrics.num_zeros)
    if metrics.sequence_length is not None:
        values["seqlen/curriculum_seqlen"] = metrics.sequence_length
    values |= {f"curriculum/{name}": float(level) for name, level in (metrics.difficulties or {}).items()}
    if metrics.kept_tokens is not None:
        values["seqlen/random_ltd_reserved_length"] = metrics.kept_tokens
    if metrics.layers_run is not None:
        values["layers-run"] = metrics.layers_run
    for name in STABILITY:
        if getattr(metrics, name) is not None:
            values[f"stability/{name.replace('_', '-')}"] = getattr(metrics, name)
    if metrics.expert_loads is not None:
        values["expert-load-min"], values["expert-load-max"] = metrics.expert_loads
    if metrics.params_norm is not None:
        values["params-norm"] = metrics.params_norm
    if with_timers:
        values |= {f"{name}-time": seconds for name, seconds in metrics.phase_seconds.items()}
    return values


# The tags that, like the losses, are also plotted over consumed samples.
OVER_SAMPLES = (
    "learning-rate",
    "batch-size",
    "loss-scale",
    "grad-norm",
    "num-zeros",
    "params-norm",
)


def evaluation_values(metrics: EvalMetrics, *, with_perplexity: bool) -> dict[str, float]:
    """Tag -> value for one evaluation; a tag is for example ``lm loss validation``."""
    values = {f"{label} {metrics.split}": mean for label, mean in metrics.losses.labelled().items()}
    if with_perplexity and metrics.predicts_text:
        values[f"{metrics.losses.terms[0].label} {metrics.split} ppl"] = metrics.perplexity
    return _known(values)


def _known(values: dict[str, float | None]) -> dict[str, float]:
    """The values that are known: where nothing counted, there is none."""
    return {tag: value for tag, value in values.items() if value is not None}
