"""Comet; it needs the comet_ml package and a project's name."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

from megazero.train.news.tracker import Tracker


class CometMonitor(Tracker):
    """Logs to an experiment of Comet, or into an archive on disk, which `comet upload` sends later.

    Of what Comet collects by itself, it leaves out whatever would look into the training.
    """

    setting, package = "comet_project", "comet_ml"
    remedy = "set COMET_API_KEY, give `--comet-offline-dir`"

    def begin(self, *, again: bool) -> None:
        logging, own = self.logging, ("log_code", "log_graph", "parse_args", "auto_output_logging")
        config = self.service.ExperimentConfig(
            name=logging.comet_experiment_name,
            offline_directory=logging.comet_offline_dir,
            display_summary_level=0,
            **dict.fromkeys((*own, "auto_metric_logging", "auto_param_logging"), False),
        )
        self._run = self.service.start(
            workspace=logging.comet_workspace,
            project_name=logging.comet_project,
            online=None if logging.comet_offline_dir is None else False,
            experiment_config=config,
            **({"experiment_key": uuid4().hex, "mode": "create"} if again else {}),
        )
        self._run.log_parameters(self.facts)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        self._run.log_metrics(values, step=iteration)

    def end(self) -> None:
        self._run.end()
