"""The services that can track a run."""

from __future__ import annotations

from megazero.config.tree.logging import LoggingConfig
from megazero.train.news.comet import CometMonitor
from megazero.train.news.mlflow import MlflowMonitor
from megazero.train.news.tracker import Tracker
from megazero.train.news.trackio import TrackioMonitor
from megazero.train.news.weights_and_biases import WandbMonitor

TRACKERS: tuple[type[Tracker], ...] = (WandbMonitor, MlflowMonitor, CometMonitor, TrackioMonitor)


def trackers_of(logging: LoggingConfig) -> list[type[Tracker]]:
    """The monitors of the services that a run asks for."""
    return [kind for kind in TRACKERS if getattr(logging, kind.setting) is not None]
