"""One CSV file per metric, in the format of DeepSpeed's CSV monitor."""

from __future__ import annotations

from pathlib import Path

from megazero.account.writers import CsvSeries, keep_aside
from megazero.config.steps import Progress
from megazero.errors import ConfigError
from megazero.train.observe.metrics import EvalMetrics, StepMetrics
from megazero.train.observe.monitors.base import Monitor

_AXIS = "iteration"


class CsvMonitor(Monitor):
    """Appends a row ``iteration,value`` to each metric's file, which is named after its tag in TensorBoard.

    A resumed training first drops the rows that it will repeat. A training from iteration 0 starts new files
    and keeps the old ones in `earlier-1`, `earlier-2`, ...

    Args:
        folder: the folder to write to; created if it does not exist.
        resumed: the training's progress so far; None if not yet known.
        with_timers: whether to also write the time of each phase.

    Raises:
        ConfigError: the folder cannot be created or written.
    """

    def __init__(
        self, folder: str | Path, resumed: Progress | None = None, *, with_timers: bool = False
    ) -> None:
        self._folder = Path(folder)
        self._with_timers = with_timers
        self._series = CsvSeries()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if resumed is not None:
                self.rewound(resumed)
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

    def rewound(self, progress: Progress) -> None:
        metrics_files = [path for path in sorted(self._folder.glob("*.csv")) if _is_metrics_file(path)]
        if progress.iteration == 0:
            keep_aside(metrics_files)
            self._series = CsvSeries()
            return
        for path in metrics_files:
            self._series.keep(path, lambda iteration: iteration <= progress.iteration)

    def _add(self, tag: str, iteration: int, value: float) -> None:
        path = self._folder / f"{tag.replace(' ', '_').replace('/', '_')}.csv"
        self._series.add(path, (_AXIS, tag), iteration, repr(float(value)))


def _is_metrics_file(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(f"{_AXIS},")
