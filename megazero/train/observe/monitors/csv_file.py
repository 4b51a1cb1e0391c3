"""One CSV file per metric, as DeepSpeed's CSV monitor writes them."""

from __future__ import annotations

import csv
from pathlib import Path

from megazero.errors import ConfigError
from megazero.train.observe.metrics import EvalMetrics, StepMetrics
from megazero.train.observe.monitors.base import Monitor


class CsvMonitor(Monitor):
    """Adds a row ``iteration,value`` to each metric's file, which is named like its tag in TensorBoard.

    A resumed training adds to the existing files.

    Args:
        folder: the folder to write to, which is created if it does not exist.
        with_timers: whether to also write the time of each phase.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: str | Path, *, with_timers: bool = False) -> None:
        self._folder = Path(folder)
        self._with_timers = with_timers
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"`csv_dir` must be a folder that can be written, but is {folder}: "
                f"{error.strerror or error}; choose another."
            ) from error

    def step(self, metrics: StepMetrics) -> None:
        for tag, value in metrics.charts(with_timers=self._with_timers).items():
            self._add(tag, metrics["iteration"], value)

    def evaluation(self, metrics: EvalMetrics) -> None:
        for tag, value in metrics.charts(with_perplexity=True).items():
            self._add(tag, metrics.iteration, value)

    def _add(self, tag: str, iteration: int, value: float) -> None:
        path = self._folder / f"{tag.replace(' ', '_').replace('/', '_')}.csv"
        fresh = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(("iteration", tag))
            writer.writerow((iteration, repr(float(value))))
