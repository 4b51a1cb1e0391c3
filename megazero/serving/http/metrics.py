"""`/metrics`: Prometheus' text, by the names that dashboards for vLLM know."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megazero.serving.engine import Counters

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_EACH = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WHOLE = (0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)


@dataclass
class Histogram:
    """Counts of seconds by upper bounds."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.counts[bisect.bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """The lines of Prometheus' text."""
        below = 0
        for bound, count in zip(
            (*self.bounds, "+Inf"), self.counts or [0] * (len(self.bounds) + 1), strict=True
        ):
            below += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {below}'
        yield f"{name}_sum{{{labels}}} {self.total}"
        yield f"{name}_count{{{labels}}} {below}"


@dataclass
class Metrics:
    """Measures of finished choices, in seconds."""

    first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST))
    each_token: Histogram = field(default_factory=lambda: Histogram(_EACH))
    whole: Histogram = field(default_factory=lambda: Histogram(_WHOLE))
    ended: Counter[str] = field(default_factory=lambda: Counter(stop=0, length=0, abort=0))

    def finished(self, reason: str, tokens: int, first: float | None, seconds: float) -> None:
        """Note the end of a choice: its tokens, seconds to the first of them and to the end."""
        self.ended[reason] += 1
        self.whole.add(seconds)
        if first is not None:
            self.first_token.add(first)
            if tokens > 1:
                self.each_token.add((seconds - first) / (tokens - 1))

    def text(self, counters: Counters, model: str) -> str:
        """The page of `/metrics`."""
        labels = 'model_name="' + model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        used = counters.pages_used / max(1, counters.pages)
        values = (
            ("num_requests_running", "gauge", "Requests of which tokens are made", counters.running),
            ("num_requests_waiting", "gauge", "Requests that wait for a place", counters.waiting),
            ("kv_cache_usage_perc", "gauge", "The share of pages in use, 1 for all", used),
            ("num_preemptions_total", "counter", "Requests that gave up their pages", counters.preemptions),
            ("prompt_tokens_total", "counter", "Tokens of prompts", counters.prompt_tokens),
            ("generation_tokens_total", "counter", "Tokens made", counters.generated_tokens),
            (
                "prefix_cache_hits_total",
                "counter",
                "Tokens of prompts found in pages",
                counters.cached_tokens,
            ),
        )
        lines = []
        for name, kind, meaning, value in values:
            lines += [*_head(name, kind, meaning), f"vllm:{name}{{{labels}}} {value}"]
        lines += _head("request_success_total", "counter", "Choices that ended, by the reason")
        for reason, count in self.ended.items():
            lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}')
        for name, meaning, histogram in (
            ("time_to_first_token_seconds", "Seconds to a choice's first token", self.first_token),
            ("time_per_output_token_seconds", "Seconds for each further token", self.each_token),
            ("e2e_request_latency_seconds", "Seconds to a choice's end", self.whole),
        ):
            lines += [*_head(name, "histogram", meaning), *histogram.lines(f"vllm:{name}", labels)]
        return "\n".join([*lines, ""])


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP vllm:{name} {meaning}.", f"# TYPE vllm:{name} {kind}"]
