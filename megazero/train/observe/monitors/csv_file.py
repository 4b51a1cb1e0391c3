"""One CSV file per metric, as DeepSpeed's CSV monitor writes them."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable
from pathlib import Path

from megazero.config.steps import Progress
from megazero.errors import ConfigError
from megazero.train.observe.metrics import EvalMetrics, StepMetrics
from megazero.train.observe.monitors.base import Monitor, keep_aside

_AXIS = "iteration"


class CsvSeries:
    """CSV files with a step and a value in each row; no step is twice in a file.

    A value at a step that a file has already passed takes the place of its rows from that step on.
    """

    def __init__(self) -> None:
        self._last: dict[Path, float] = {}

    def add(self, path: Path, header: tuple[str, str], step: float, value: object) -> None:
        """Add a row; a new file begins with the header."""
        if path not in self._last:
            steps = [_step(row) for row in _rows(path)] if path.exists() else []
            self._last[path] = max(filter(math.isfinite, steps), default=-math.inf)
        if step <= self._last[path]:
            self.keep(path, lambda earlier: earlier < step)
        fresh = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([header] * fresh + [(step, value)])
        self._last[path] = step

    def keep(self, path: Path, wanted: Callable[[float], bool]) -> None:
        """Keep the header and the rows with a step that is wanted."""
        self._last.pop(path, None)
        header, *rows = _rows(path)
        part = path.with_name(path.name + ".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *(r for r in rows if wanted(_step(r)))])
        os.replace(part, path)


class CsvMonitor(Monitor):
    """Adds a row ``iteration,value`` to each metric's file, which is named like its tag in TensorBoard.

    A resumed training adds to the existing files, without the rows that it repeats. A training from
    iteration 0 starts new ones and keeps the old ones in `earlier-1`, `earlier-2`, ...

    Args:
        folder: the folder to write to, which is created if it does not exist.
        resumed: what the training has done so far; None if that is not known yet.
        with_timers: whether to also write the time of each phase.

    Raises:
        ConfigError: the folder cannot be made or written.
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
        ours = [path for path in sorted(self._folder.glob("*.csv")) if _is_ours(path)]
        if progress.iteration == 0:
            keep_aside(ours)
            self._series = CsvSeries()
            return
        for path in ours:
            self._series.keep(path, lambda iteration: iteration <= progress.iteration)

    def _add(self, tag: str, iteration: int, value: float) -> None:
        path = self._folder / f"{tag.replace(' ', '_').replace('/', '_')}.csv"
        self._series.add(path, (_AXIS, tag), iteration, repr(float(value)))


def _is_ours(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(f"{_AXIS},")


def _rows(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def _step(row: list[str]) -> float:
    """The step of a row; NaN, which is no step, for a header or a row that a crash cut short."""
    try:
        return float(row[0]) if len(row) == 2 else math.nan
    except ValueError:
        return math.nan
