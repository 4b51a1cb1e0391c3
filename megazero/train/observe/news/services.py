"""The services that can track a run: Weights & Biases, MLflow, Comet and Trackio."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from uuid import uuid4

from megazero.account.writers import over
from megazero.config.tree.logging import LoggingConfig
from megazero.train.observe.news.tracker import Tracker

AXIS = "iteration"
"""The metric over which Weights & Biases draws all others, because its step cannot go back."""


class WandbMonitor(Tracker):
    """Logs to Weights & Biases."""

    setting, package, remedy = "wandb_project", "wandb", "log in with `wandb login`"
    ends = "finish"

    def begin(self, *, again: bool) -> object:
        run = self.service.init(
            project=self.logging.wandb_project,
            name=self.logging.wandb_exp_name,
            entity=self.logging.wandb_entity,
            group=self.logging.wandb_group,
            dir=self.logging.wandb_save_dir,
            config=self.facts,
            **({"id": uuid4().hex[:8], "resume": "never"} if again else {}),
        )
        return over(AXIS, run)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        self.run.log({**values, AXIS: iteration})


class MlflowMonitor(Tracker):
    """Logs to MLflow; each setting is a parameter, such as ``model.hidden_size``."""

    setting, package, remedy = "mlflow_experiment", "mlflow", "check `--mlflow-tracking-uri`"
    logs, ends = "log_metrics", "end_run"

    def begin(self, *, again: bool) -> object:
        if self.logging.mlflow_tracking_uri is not None:
            self.service.set_tracking_uri(self.logging.mlflow_tracking_uri)
        self.service.set_experiment(self.logging.mlflow_experiment)
        self.service.start_run(run_name=self.logging.mlflow_run_name)
        facts = ((f"{part}.{name}", value) for part, of in self.facts.items() for name, value in of.items())
        while some := dict(islice(facts, 100)):  # MLflow takes no more at once
            self.service.log_params(some)
        return self.service


class CometMonitor(Tracker):
    """Logs to Comet, or into an archive; leaves out what Comet would collect inside the training."""

    setting, package = "comet_project", "comet_ml"
    remedy = "set COMET_API_KEY, give `--comet-offline-dir`"
    logs, ends = "log_metrics", "end"

    def begin(self, *, again: bool) -> object:
        own = ("log_code", "log_graph", "parse_args", "auto_metric_logging", "auto_param_logging")
        config = self.service.ExperimentConfig(
            name=self.logging.comet_experiment_name,
            offline_directory=self.logging.comet_offline_dir,
            display_summary_level=0,
            **dict.fromkeys((*own, "auto_output_logging"), False),
        )
        run = self.service.start(
            workspace=self.logging.comet_workspace,
            project_name=self.logging.comet_project,
            online=None if self.logging.comet_offline_dir is None else False,
            experiment_config=config,
            **({"experiment_key": uuid4().hex, "mode": "create"} if again else {}),
        )
        run.log_parameters(self.facts)
        return run


class TrackioMonitor(Tracker):
    """Logs to Trackio."""

    setting, package, remedy = "trackio_project", "trackio", "choose another name"
    logs, ends = "log", "finish"

    def prepare(self) -> None:
        if self.logging.trackio_dir is not None:
            os.environ["TRACKIO_DIR"] = str(Path(self.logging.trackio_dir).absolute())

    def begin(self, *, again: bool) -> object:
        names = (self.logging.trackio_project, self.logging.trackio_run_name)
        self.service.init(*names, config=self.facts, embed=False)
        return self.service


def trackers_of(logging: LoggingConfig) -> list[type[Tracker]]:
    """The monitors of the services that a run asks for."""
    known: tuple[type[Tracker], ...] = (WandbMonitor, MlflowMonitor, CometMonitor, TrackioMonitor)
    return [kind for kind in known if getattr(logging, kind.setting) is not None]
