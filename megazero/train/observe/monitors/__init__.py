"""Monitors, which show or record a run's metrics: one file per destination.

`base.py` has the base class and a composite; `console.py` prints lines and a progress bar, `jsonl.py` writes
one object per iteration, `csv_file.py` one file per metric; `tensorboard.py` draws charts, as do
the trackers of `observe/news`.
"""

from __future__ import annotations

from megazero.config.steps import Progress
from megazero.config.tree.config import Config
from megazero.train.observe.monitors.base import CompositeMonitor, Monitor
from megazero.train.observe.monitors.console import ConsoleMonitor
from megazero.train.observe.monitors.csv_file import CsvMonitor
from megazero.train.observe.monitors.jsonl import JsonlMonitor
from megazero.train.observe.monitors.tensorboard import TensorBoardMonitor
from megazero.train.observe.news.forecast import Forecast


def build_monitors(
    config: Config, is_writer_rank: bool, resumed: Progress, end: Progress
) -> CompositeMonitor:
    """Build the monitors of the `logging` section; none on ranks that do not write.

    Args:
        is_writer_rank: true on exactly one rank.
        resumed: the training's progress before this process.
        end: the progress at the end of the training.

    Raises:
        ConfigError: a destination cannot be written, or its package is missing.
    """
    if not is_writer_rank:
        return CompositeMonitor()
    logging = config.logging
    forecast = Forecast(end.tokens)
    members: list[Monitor] = [
        ConsoleMonitor(logging.log_interval, end.iteration, resumed.iteration, forecast=forecast),
    ]
    if logging.metrics_jsonl is not None:
        members.append(JsonlMonitor(logging.metrics_jsonl, resumed.iteration))
    if logging.csv_dir is not None:
        members.append(CsvMonitor(logging.csv_dir, resumed))
    if logging.tensorboard_dir is not None:
        members.append(TensorBoardMonitor(logging, resumed))
    from megazero.train.observe.news.services import trackers_of  # which are monitors themselves

    return CompositeMonitor([*members, *(tracker(config) for tracker in trackers_of(logging))])
