"""Console output: plain lines, and on a terminal a progress bar."""

from __future__ import annotations

import sys
from datetime import datetime

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from megazero.config.steps import Progress
from megazero.train.observe.metrics import EvalMetrics, StepMetrics, line_of
from megazero.train.observe.monitors.base import Monitor
from megazero.train.observe.news.forecast import Forecast


class ConsoleMonitor(Monitor):
    """Prints a line every `log_interval` iterations and after the last one, in Megatron-LM's format.

    Losses are means over the updates of the interval, times and rates are over all its iterations, and other
    values are those of the latest iteration. The forecast of the end comes last. On a terminal, a progress
    bar follows every iteration.

    Args:
        log_interval: iterations per line.
        total_iterations: length of the training, for the bar; None if unknown.
        resume_iteration: number of iterations before this process.
        forecast: forecasts the end of the training; None if that is unknown.
        console: where to print; standard output by default.
    """

    def __init__(
        self,
        log_interval: int,
        total_iterations: int | None = None,
        resume_iteration: int = 0,
        *,
        forecast: Forecast | None = None,
        console: Console | None = None,
    ) -> None:
        # FORCE_COLOR, which notebooks and CI set, is no terminal that a bar can move on.
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        self._log_interval = log_interval
        self._total = total_iterations
        self._interval: list[StepMetrics] = []
        self._bar: ProgressBar | None = None
        self._resumed_at = resume_iteration
        self._forecast = forecast

    def step(self, metrics: StepMetrics) -> None:
        self._interval.append(metrics)
        if self._forecast is not None:
            self._forecast.step(metrics)
        if metrics["skipped"]:
            self._print(_skipped_line(metrics))
        if metrics["iteration"] % self._log_interval == 0 or metrics["iteration"] == self._total:
            self._print_interval()
        if self._console.is_terminal:
            self._advance_bar(metrics)

    def evaluation(self, metrics: EvalMetrics) -> None:
        parts = [f" {metrics.split} {metrics.what} at iteration {metrics.iteration}"]
        parts += [f"{label} value: {_shown(mean)}" for label, mean in metrics.losses.labelled().items()]
        if metrics.predicts_text:
            parts.insert(2, f"{metrics.losses.terms[0].label} PPL: {_shown(metrics.perplexity)}")
        line = " | ".join([*parts, f"seconds: {metrics.seconds:.1f} |"])
        rule = "-" * len(line)
        self._print(f"{rule}\n{line}\n{rule}")

    def message(self, text: str) -> None:
        self._print(text)

    def rewound(self, progress: Progress) -> None:
        self._interval = [step for step in self._interval if step["iteration"] <= progress.iteration]

    def trained(self) -> None:
        if self._interval:
            self._print_interval()

    def close(self) -> None:
        self.trained()
        if self._bar is not None:
            self._bar.stop()

    def _print_interval(self) -> None:
        line = interval_line(self._interval, self._total)
        if self._forecast is not None and (forecast := self._forecast.text()) is not None:
            line += f" {forecast} |"
        self._print(f" [{datetime.now():%Y-%m-%d %H:%M:%S}] {line}")
        self._interval = []

    def _print(self, text: str) -> None:
        # No markup or wrapping, so that each line stays one line in a log file, with its brackets.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _advance_bar(self, metrics: StepMetrics) -> None:
        if self._bar is None:  # created at the first step, after start-up messages
            self._bar = ProgressBar(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.add_task("training", total=self._total, completed=self._resumed_at, note="")
            self._bar.start()
        loss = metrics.losses.total
        shown = "none" if loss is None else f"{loss:.4f}"
        note = f"loss {shown}  {metrics['tokens_per_second']:,.0f} tokens/s"
        self._bar.update(self._bar.task_ids[0], completed=metrics["iteration"], note=note)


def interval_line(interval: list[StepMetrics], total: int | None) -> str:
    """The line for one or more iterations, without the time stamp."""
    progress = f"iteration {interval[-1]['iteration']:8d}/{total if total is not None else '?':>8}"
    return " | ".join([progress, *line_of(interval)]) + " |"


def _shown(value: float | None) -> str:
    return "none, nothing counts" if value is None else f"{value:.6E}"


def _skipped_line(metrics: StepMetrics) -> str:
    if metrics.losses.total is None:
        return f" iteration {metrics['iteration']}: update skipped, nothing in the global batch counts"
    where = f"; first in `{metrics['first_bad_parameter']}`" if metrics["first_bad_parameter"] else ""
    return (
        f" iteration {metrics['iteration']}: update skipped, a gradient is inf or NaN at loss scale "
        f"{metrics['loss_scale']:g}{where}"
    )
