"""The metrics of steps, as rows of one table, and of evaluations; the same on all ranks.

A row says how to compute a metric and how to show it in charts and on the console.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from megazero.config.steps import Progress
from megazero.config.tree.logging import LoggingConfig
from megazero.optim.grad_norm import clip_coefficient
from megazero.train.observe.meters import Meters, StepFacts
from megazero.train.observe.metric import (
    Chart,
    Interval,
    Largest,
    Line,
    Metric,
    expert_loads,
    iteration_time,
    load_span,
    loss_means,
    offload_traffic,
    rate,
    shown,
    skips,
)
from megazero.train.observe.peak import attention_peak
from megazero.train.step.engine import Outcome
from megazero.train.step.losses import Losses
from megazero.train.step.stability import Stability
from megazero.zero.optimizer import Optimizer


def _stability(name: str, unit: str, of: Callable[[Stability], float | None]) -> Metric:
    """A row of a stability statistic; it is known if it is logged and the step made an update."""

    def value(facts: StepFacts) -> float | None:
        known = facts.state.stability
        return None if known is None or facts.result.skipped or not known.updates else of(known)

    line = shown(f"{name.replace('_', ' ')}: {{:.3E}}", 160)
    return Metric(name, unit, value, Chart(f"stability/{name.replace('_', '-')}"), line, optional=True)


def _logging(facts: StepFacts) -> LoggingConfig:
    return facts.meters.config.logging


def _optimizer(facts: StepFacts) -> Optimizer:
    return facts.meters.engine.optimizer


def _clip_factor(facts: StepFacts) -> float | None:
    """The factor, if the run clips and the step made an update."""
    bound = facts.meters.config.optimizer.clip_grad
    return clip_coefficient(facts.result.grad_norm, bound) if bound and not facts.result.skipped else None


METRICS = (
    Metric("iteration", "from 1", lambda f: f.state.iteration),
    Metric(
        "consumed_samples",
        "sequences so far",
        lambda f: f.state.consumed_samples,
        line=shown("consumed samples: {:12d}", 10),
    ),
    Metric(
        "consumed_tokens",
        "tokens so far",
        lambda f: f.state.consumed_tokens,
        line=shown("consumed tokens: {:12d}", 20),
    ),
    Metric(
        "losses",
        "by term, on the global batch",
        lambda f: f.result.losses,
        Chart("{}", over_samples=True),
        Line(loss_means, 130),
    ),
    Metric(
        "grad_norm",
        "before clipping, unscaled; inf or NaN if that caused the step to be skipped",
        lambda f: f.result.grad_norm,
        Chart("grad-norm", over_samples=True),
        shown("grad norm: {:.3f}", 150),
    ),
    Metric(
        "clip_factor",
        "by which clipping multiplied the gradient; 1 where it was short enough",
        _clip_factor,
        Chart("clip-factor", over_samples=True),
        optional=True,
    ),
    Metric(
        "learning_rate",
        "of this update",
        lambda f: f.result.learning_rate,
        Chart("learning-rate", over_samples=True),
        shown("learning rate: {:.6E}", 70),
    ),
    Metric(
        "loss_scale",
        "of this step",
        lambda f: f.result.loss_scale,
        Chart("loss-scale", over_samples=True),
        shown("loss scale: {:.1f}", 140),
    ),
    Metric(
        "skipped",
        "whether no update was made",
        lambda f: f.result.skipped,
        Chart("skipped-iterations"),
        Line(skips, 1000),
    ),
    Metric("seconds", "wall time", lambda f: f.seconds, Chart("iteration-time"), Line(iteration_time, 30)),
    Metric(
        "tokens_per_second",
        "of all ranks together, padding and what layers skip included",
        lambda f: f.tokens_per_second,
        Chart("tokens-per-second"),
        Line(rate("tokens per second: {:.1f}"), 40),
    ),
    Metric(
        "tflops",
        "model TFLOP/s of one rank, without padding and what was skipped (`account/flops.py`)",
        lambda f: f.flops / 1e12,
        Chart("throughput"),
        Line(rate("throughput per rank (TFLOP/s): {:.3f}"), 50),
    ),
    Metric(
        "matmul_share",
        "`tflops` as a share of the rank's measured matmul rate, 0 to 1",
        lambda f: f.flops / f.meters.matmul_rate,
        Chart("matmul-share"),
        Line(rate("share of matmul rate: {:.1f}%", 100), 60),
    ),
    Metric(
        "global_batch_size",
        "sequences",
        lambda f: f.step.batch_size,
        Chart("batch-size", over_samples=True),
        shown("global batch size: {:5d}", 80),
    ),
    Metric("num_micro_batches", "forward passes per replica", lambda f: f.step.micro_batches),
    Metric(
        "params_norm",
        "of the parameters after the update, if asked for",
        lambda f: _optimizer(f).measures.params_norm() if _logging(f).log_params_norm else None,
        Chart("params-norm", over_samples=True),
        shown("params norm: {:.3f}", 215),
        gathered=True,
    ),
    Metric(
        "num_zeros",
        "elements of the gradient that are zero, if asked for",
        lambda f: _optimizer(f).measures.count_zero_grads() if _logging(f).log_num_zeros_in_grad else None,
        Chart("num-zeros", over_samples=True),
        shown("num zeros: {}", 210),
        gathered=True,
    ),
    Metric(
        "first_bad_parameter",
        "global name of the first one with a gradient that is not finite",
        lambda f: f.result.first_bad_parameter,
    ),
    Metric(
        "phase_seconds",
        "wall time of each named phase (`timers.py`)",
        lambda f: f.meters.timers.collect(),
        Chart("{}-time"),
    ),
    Metric(
        "sequence_length",
        "tokens of a sequence, where a curriculum lets it grow",
        lambda f: f.step.sequence_length if f.meters.plan.steps.lengths.grow else None,
        Chart("seqlen/curriculum_seqlen"),
        shown("sequence length: {:5d}", 90),
        optional=True,
    ),
    Metric(
        "difficulties",
        "how difficult samples may be, by the metric of a curriculum over samples",
        lambda f: f.meters.difficulties.at(f.step.before) if f.meters.difficulties else None,
        Chart("curriculum/{}"),
        shown("difficulty: {}", 100),
        optional=True,
    ),
    Metric(
        "kept_tokens",
        "tokens of a sequence that layers with random-LTD saw, where they did not see all",
        lambda f: f.step.kept_tokens,
        Chart("seqlen/random_ltd_reserved_length"),
        shown("tokens kept by random-LTD: {:5d}", 110),
        optional=True,
    ),
    Metric(
        "layers_run",
        "layers that ran, with progressive layer dropping",
        lambda f: f.skipping.layers_run,
        Chart("layers-run"),
        shown("layers run: {:3d}", 120),
        optional=True,
    ),
    _stability("loss_ratio", "as a multiple of the lowest before (`stability.py`)", lambda s: s.loss_ratio),
    _stability("loss_deviation", "standard deviation over recent updates", lambda s: s.loss.deviation),
    _stability(
        "grad_norm_deviation", "standard deviation over recent updates", lambda s: s.grad_norm.deviation
    ),
    Metric(
        "max_attention_logit",
        "largest scaled product of a query and a key that it attends to, on any rank, if asked for",
        Largest(
            "max_attention_logit",
            lambda config, engine: attention_peak(engine) if config.logging.log_max_attention_logit else None,
        ),
        Chart("max-attention-logit"),
        shown("max attention logit: {:.3f}", 158),
        optional=True,
        gathered=True,
    ),
    Metric(
        "tokens_per_expert",
        "by layer with experts: how often each was chosen, before any token was dropped",
        lambda f: (
            f.meters.tokens_per_expert(f.result)
            if f.state.iteration % _logging(f).log_interval == 0
            else None
        ),
        Chart("expert-load-{}", of=expert_loads),
        Line(load_span, 200),
        optional=True,
        gathered=True,
    ),
    Metric(
        "rank_seconds",
        "minimum, median and maximum over ranks (`stragglers.py`), after a comparison of them",
        lambda f: f.meters.stragglers.take_summary(),
        optional=True,
        gathered=True,
    ),
    Metric(
        "offload",
        "bytes of offloaded state `read` and `written`, and seconds that the step `waited` for them",
        lambda f: None if (moved := f.meters.moved) is None else asdict(moved),
        line=Line(offload_traffic, 190),
        optional=True,
        gathered=True,
    ),
    Metric(
        "memory",
        "bytes of each rank by place and by what they hold (`memory.py`), in the first iteration",
        lambda f: f.meters.memory_of_first_step(),
        optional=True,
        gathered=True,
    ),
)
"""All metrics of a step, in the order of JSON lines."""

LINE = tuple(sorted((m for m in METRICS if m.line is not None), key=lambda m: m.line.place if m.line else 0))
"""The metrics on the console, in the order of a line's parts."""

_NAMES = frozenset(metric.name for metric in METRICS)


class StepMetrics(dict[str, Any]):
    """The metrics of one iteration: name of a row of `METRICS` -> value; None if unknown."""

    def __init__(self, **values: object):
        assert values.keys() <= _NAMES, f"these are no metrics: {sorted(values.keys() - _NAMES)}"
        super().__init__({metric.name: values.get(metric.name) for metric in METRICS})
        self["phase_seconds"] = values.get("phase_seconds", {})

    @classmethod
    def of(cls, facts: StepFacts) -> StepMetrics:
        """Compute the metrics of a step; every rank calls this, because some need communication."""
        made = facts.result.outcome is not Outcome.PASSED_OVER
        gathered = {metric.name: metric.of(facts) for metric in METRICS if metric.gathered and made}
        facts = replace(facts, seconds=facts.meters.seconds)
        return cls(**gathered, **{m.name: m.of(facts) for m in METRICS if not m.gathered})

    @property
    def losses(self) -> Losses:
        """The losses of the global batch, by term."""
        losses: Losses = self["losses"]
        return losses

    def record(self) -> dict[str, object]:
        """Name -> value, with each loss term in place of `losses`, and without unknown optional metrics."""
        known = {m.name: self[m.name] for m in METRICS if not (m.optional and self[m.name] is None)}
        return _with_terms(known)

    def charts(self, *, with_timers: bool) -> dict[str, float]:
        """Tag -> value of all known metrics; with the time of each phase only if `with_timers`."""
        shown = (metric for metric in METRICS if with_timers or metric.name != "phase_seconds")
        return {tag: value for metric in shown for tag, value in metric.charted(self).items()}

    def tags_over_samples(self) -> set[str]:
        """The tags that are also drawn over consumed samples."""
        chosen = (metric for metric in METRICS if metric.chart is not None and metric.chart.over_samples)
        return {tag for metric in chosen for tag in metric.charted(self)}


def watch(meters: Meters) -> None:
    """Let the metrics that watch layers begin to, as far as the run asks for them."""
    for figure in (metric.of for metric in METRICS if isinstance(metric.of, Largest)):
        peak = figure.watch(meters.config, meters.engine)
        if peak is not None:
            meters.peaks[figure.name] = peak


def line_of(interval: Interval) -> list[str]:
    """The parts of the console's line for an interval."""
    texts = (metric.line.text(interval, metric.name) for metric in LINE if metric.line is not None)
    return [text for text in texts if text is not None]


@dataclass(frozen=True)
class EvalMetrics:
    """One evaluation of one split.

    Attributes:
        progress: the training's iterations, samples and tokens so far.
        split: `validation` or `test`.
        losses: the losses, by term.
        num_tokens: the first term's count, such as the number of tokens with a loss.
        seconds: wall time.
        predicts_text: whether the first term is a language model's loss, which has a perplexity.
        what: the word for the terms.
    """

    predicts_text: ClassVar[bool] = True
    what: ClassVar[str] = "loss"

    progress: Progress
    split: str
    losses: Losses
    num_tokens: int
    seconds: float

    @property
    def iteration(self) -> int:
        """The number of training iterations so far."""
        return self.progress.iteration

    @property
    def perplexity(self) -> float | None:
        """exp(loss) of the first term; as in Megatron-LM, the loss is capped at 20."""
        loss = self.losses.main
        return None if loss is None else math.exp(min(loss, 20.0))  # in this order, min keeps a NaN

    def record(self) -> dict[str, object]:
        """Name -> value of every field, with each loss term in place of `losses`, and the perplexity."""
        record = _with_terms({"iteration": self.iteration, "split": self.split, "losses": self.losses})
        return {
            **record,
            "consumed_samples": self.progress.samples,
            "consumed_tokens": self.progress.tokens,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            **({"perplexity": self.perplexity} if self.predicts_text else {}),
        }

    def charts(self, *, with_perplexity: bool) -> dict[str, float]:
        """Tag, such as ``lm loss validation`` -> value, for all known values."""
        values = {f"{label} {self.split}": mean for label, mean in self.losses.labelled().items()}
        if with_perplexity and self.predicts_text:
            values[f"{self.losses.terms[0].label} {self.split} ppl"] = self.perplexity
        return {tag: value for tag, value in values.items() if value is not None}


def _with_terms(values: Mapping[str, object]) -> dict[str, object]:
    """Replace `losses` by an entry for each loss term."""
    record: dict[str, object] = {}
    for name, value in values.items():
        new = value.record() if isinstance(value, Losses) else {name: value}
        assert not record.keys() & new.keys(), f"a loss term has the name of a metric: {sorted(new)}"
        record |= new
    return record
