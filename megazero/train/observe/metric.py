"""A row of the table of metrics, and the ways in which a row's values become text on the console."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megazero.config.tree.config import Config
from megazero.train.observe.meters import StepFacts
from megazero.train.observe.peak import Peak
from megazero.train.step.engine import Engine
from megazero.train.step.losses import Losses

Interval = Sequence[Mapping[str, Any]]
"""One or more iterations that share a line on the console."""


@dataclass(frozen=True)
class Chart:
    """The name of a metric in charts: Megatron's, so that old and new runs share one.

    Attributes:
        tag: the tag, in which ``{}`` stands for the name of each value if there are several.
        over_samples: whether it is also drawn over consumed samples.
        of: turns the metric's value into what is drawn.
    """

    tag: str
    over_samples: bool = False
    of: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Line:
    """The part of a line on the console that shows a metric.

    Attributes:
        text: (interval, name of the metric) -> text; None leaves the metric out.
        place: parts come in this order.
    """

    text: Callable[[Interval, str], str | None]
    place: int


@dataclass(frozen=True)
class Metric:
    """A row: one number, or a few by name, that a step reports.

    Attributes:
        name: its key in JSON lines.
        unit: its unit, and its meaning where the name does not tell.
        of: takes it from the facts of a step; None where it is not known.
        chart: its name in charts; None for none.
        line: its part of the console's line; None for none.
        optional: whether records leave it out where it is not known, instead of saying null.
        gathered: whether it takes communication or the latest measurement, so that only steps that were made
            have it; it is taken before the step's time.
    """

    name: str
    unit: str
    of: Callable[[StepFacts], Any]
    chart: Chart | None = None
    line: Line | None = None
    optional: bool = False
    gathered: bool = False

    def charted(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Tag -> value of this metric; losses of a skipped step are left out, as nothing was learnt."""
        value = metrics[self.name]
        if self.chart is None or value is None or (isinstance(value, Losses) and metrics["skipped"]):
            return {}
        drawn = self.chart.of(value)
        named = (
            drawn.labelled()
            if isinstance(drawn, Losses)
            else drawn
            if isinstance(drawn, Mapping)
            else {"": drawn}
        )
        return {self.chart.tag.format(name): float(x) for name, x in named.items() if x is not None}


def shown(form: str, place: int) -> Line:
    """The latest iteration's value in this format; values by name have a part each, which begins with it."""

    def text(interval: Interval, name: str) -> str | None:
        value = interval[-1][name]
        if isinstance(value, Mapping):
            return " | ".join(f"{key} {form.format(item)}" for key, item in value.items()) or None
        return None if value is None else form.format(value)

    return Line(text, place)


@dataclass(frozen=True)
class Largest:
    """The value of a metric that is the largest number that layers note in a step, on any rank.

    Attributes:
        name: the metric's name.
        watch: makes the layers of an engine note it; None where the run does not ask for it.
    """

    name: str
    watch: Callable[[Config, Engine], Peak | None]

    def __call__(self, facts: StepFacts) -> float | None:
        peak = facts.meters.peaks.get(self.name)
        return None if peak is None else peak.take(facts.meters.engine.context.world)


def rate(form: str, factor: float = 1.0) -> Callable[[Interval, str], str]:
    """The mean of a per-second value, weighted by the time of each iteration."""

    def text(interval: Interval, name: str) -> str:
        seconds = sum(metrics["seconds"] for metrics in interval)
        done = sum(metrics[name] * metrics["seconds"] for metrics in interval)
        return form.format(factor * (done / seconds) if seconds > 0 else math.nan)

    return text


def iteration_time(interval: Interval, name: str) -> str:
    """The mean wall time of an iteration."""
    mean = 1000 * sum(metrics[name] for metrics in interval) / len(interval)
    return f"elapsed time per iteration (ms): {mean:.1f}"


def _made(interval: Interval) -> list[Losses]:
    return [metrics["losses"] for metrics in interval if not metrics["skipped"]]


def loss_means(interval: Interval, name: str) -> str | None:
    """The mean of each term over the iterations with an update in which anything counted for it."""
    by_label: dict[str, list[float]] = {}
    for losses in _made(interval):
        for label, mean in losses.labelled().items():
            if mean is not None:
                by_label.setdefault(label, []).append(mean)
    return " | ".join(f"{label}: {sum(x) / len(x):.6E}" for label, x in by_label.items()) or None


def skips(interval: Interval, name: str) -> str:
    """The numbers of iterations without an update, and of those with one whose loss was NaN."""
    bad = sum(math.isnan(losses.trained_total) for losses in _made(interval))
    skipped = sum(metrics[name] for metrics in interval)
    return f"number of skipped iterations: {skipped:3d} | number of nan iterations: {bad:3d}"


def offload_traffic(interval: Interval, name: str) -> str | None:
    """The traffic to and from offloaded state, per second of the interval."""
    if interval[-1][name] is None:
        return None
    seconds = sum(metrics["seconds"] for metrics in interval)
    moved = [metrics[name] for metrics in interval if metrics[name] is not None]
    read, written, waited = (sum(part[kind] for part in moved) for kind in ("read", "written", "waited"))
    rates = f"{read / seconds / 1e6:.1f} MB/s read, {written / seconds / 1e6:.1f} MB/s written"
    return f"offload: {rates}, waited for {100 * waited / seconds:.1f}% of the time"


def expert_loads(layers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The loads of the idlest and the busiest expert of all, as multiples of an even share."""
    counts = [layer["tokens"] for layer in layers]
    loads = [count * len(tokens) / max(1, sum(tokens)) for tokens in counts for count in tokens]
    return {"min": min(loads), "max": max(loads)} if loads else {}


def load_span(interval: Interval, name: str) -> str | None:
    """The loads of the idlest and the busiest expert in the latest iteration."""
    loads = expert_loads(interval[-1][name] or ())
    return "expert loads (of an even share): {min:.2f} to {max:.2f}".format(**loads) if loads else None
