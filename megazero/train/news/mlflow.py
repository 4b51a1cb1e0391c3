"""MLflow; it needs the mlflow package and an experiment's name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from megazero.train.news.tracker import Tracker

_MOST = 100  # parameters that MLflow takes at once


class MlflowMonitor(Tracker):
    """Logs to a run of MLflow; each setting is a parameter, such as ``model.hidden_size``."""

    setting, package = "mlflow_experiment", "mlflow"
    remedy = "check `--mlflow-tracking-uri`"

    def begin(self, *, again: bool) -> None:
        if self.logging.mlflow_tracking_uri is not None:
            self.service.set_tracking_uri(self.logging.mlflow_tracking_uri)
        self.service.set_experiment(self.logging.mlflow_experiment)
        self.service.start_run(run_name=self.logging.mlflow_run_name)
        facts = ((f"{part}.{name}", value) for part, of in self.facts.items() for name, value in of.items())
        while some := dict(islice(facts, _MOST)):
            self.service.log_params(some)

    def log(self, values: Mapping[str, float], iteration: int) -> None:
        self.service.log_metrics(values, step=iteration)

    def end(self) -> None:
        self.service.end_run()
