"""`build_monitors`, which builds the monitors that a run asks for."""

from __future__ import annotations

from megazero.config.steps import Progress
from megazero.config.tree.config import Config
from megazero.train.news.forecast import Forecast
from megazero.train.news.trackers import trackers_of
from megazero.train.observe.monitors.base import CompositeMonitor, Monitor
from megazero.train.observe.monitors.console import ConsoleMonitor
from megazero.train.observe.monitors.csv_file import CsvMonitor
from megazero.train.observe.monitors.jsonl import JsonlMonitor
from megazero.train.observe.monitors.tensorboard import TensorBoardMonitor


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
    return CompositeMonitor([*members, *(tracker(config) for tracker in trackers_of(logging))])
