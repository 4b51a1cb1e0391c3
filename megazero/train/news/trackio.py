"""Trackio; it needs the trackio package and a project's name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megazero.config.tree.config import Config
from megazero.train.news.tracker import Tracker


class TrackioMonitor(Tracker):
    """Logs to a run of Trackio, which keeps it on this machine."""

    setting, package = "trackio_project", "trackio"
    remedy = "choose another name"

    def __init__(self, config: Config) -> None:
        if config.logging.trackio_dir is not None:  # the package reads it once, when it is imported
            os.environ["TRACKIO_DIR"] = str(Path(config.logging.trackio_dir).absolute())
        super().__init__(config)

    def begin(self, *, again: bool) -> None:
        logging = self.logging
        self.service.init(logging.trackio_project, logging.trackio_run_name, config=self.facts, embed=False)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        self.service.log(dict(values), step=iteration)

    def end(self) -> None:
        self.service.finish()
