"""`Metric`: a row of the table of metrics, and functions that format its values for the console."""

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
"""The metrics of one or more iterations that share a line on the console."""


@dataclass(frozen=True)
class Chart:
    """A metric's chart, with Megatron-LM's tag, so that its runs and these share charts.

    Attributes:
        tag: the tag, in which ``{}`` stands for the name of each value if there are several.
        over_samples: whether it is also drawn over consumed samples.
        of: converts the metric's value to the drawn value.
    """

    tag: str
    over_samples: bool = False
    of: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Line:
    """A metric's part of a line on the console.

    Attributes:
        text: (interval, name of the metric) -> text; None omits the metric.
        place: the parts of a line are sorted by this number.
    """

    text: Callable[[Interval, str], str | None]
    place: int


@dataclass(frozen=True)
class Metric:
    """A row of the table: one number, or several by name, that a step reports.

    Attributes:
        name: its key in JSON lines.
        unit: its unit, and its meaning if the name does not say it.
        of: facts of a step -> the value; None if unknown.
        chart: its chart, or None.
        line: its part of the console's line, or None.
        optional: whether records omit an unknown value instead of writing null.
        gathered: whether it needs communication or a new measurement. Then steps that were passed over do not
            have it, and it is computed before the step's time is taken.
    """

    name: str
    unit: str
    of: Callable[[StepFacts], object]
    chart: Chart | None = None
    line: Line | None = None
    optional: bool = False
    gathered: bool = False

    def charted(self, metrics: Mapping[str, object]) -> dict[str, float]:
        """Tag -> value of this metric; empty for losses of a skipped step."""
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
    """Show the latest iteration's value in this format; several values each with its name before it."""

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
    """Show the mean of a per-second value, weighted by the time of each iteration."""

    def text(interval: Interval, name: str) -> str:
        seconds = sum(metrics["seconds"] for metrics in interval)
        done = sum(metrics[name] * metrics["seconds"] for metrics in interval)
        return form.format(factor * (done / seconds) if seconds > 0 else math.nan)

    return text


def iteration_time(interval: Interval, name: str) -> str:
    """Show the mean wall time of an iteration."""
    mean = 1000 * sum(metrics[name] for metrics in interval) / len(interval)
    return f"elapsed time per iteration (ms): {mean:.1f}"


def _made(interval: Interval) -> list[Losses]:
    return [metrics["losses"] for metrics in interval if not metrics["skipped"]]


def loss_means(interval: Interval, name: str) -> str | None:
    """Show the mean of each loss term over the iterations with an update in which the term is known."""
    by_label: dict[str, list[float]] = {}
    for losses in _made(interval):
        for label, mean in losses.labelled().items():
            if mean is not None:
                by_label.setdefault(label, []).append(mean)
    return " | ".join(f"{label}: {sum(x) / len(x):.6E}" for label, x in by_label.items()) or None


def skips(interval: Interval, name: str) -> str:
    """Show the number of iterations without an update, and of updates whose loss was NaN."""
    bad = sum(math.isnan(losses.trained_total) for losses in _made(interval))
    skipped = sum(metrics[name] for metrics in interval)
    return f"number of skipped iterations: {skipped:3d} | number of nan iterations: {bad:3d}"


def offload_traffic(interval: Interval, name: str) -> str | None:
    """Show the traffic of offloaded state per second, and the fraction of time that steps waited for it."""
    if interval[-1][name] is None:
        return None
    seconds = sum(metrics["seconds"] for metrics in interval)
    moved = [metrics[name] for metrics in interval if metrics[name] is not None]
    read, written, waited = (sum(part[kind] for part in moved) for kind in ("read", "written", "waited"))
    rates = f"{read / seconds / 1e6:.1f} MB/s read, {written / seconds / 1e6:.1f} MB/s written"
    return f"offload: {rates}, waited for {100 * waited / seconds:.1f}% of the time"


def expert_loads(layers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The loads of the idlest and the busiest expert of all layers, as multiples of an even share."""
    counts = [layer["tokens"] for layer in layers]
    loads = [count * len(tokens) / max(1, sum(tokens)) for tokens in counts for count in tokens]
    return {"min": min(loads), "max": max(loads)} if loads else {}


def load_span(interval: Interval, name: str) -> str | None:
    """Show the loads of the idlest and the busiest expert in the latest iteration."""
    loads = expert_loads(interval[-1][name] or ())
    return "expert loads (of an even share): {min:.2f} to {max:.2f}".format(**loads) if loads else None
