"""The services that track a run: they keep what the charts show; stand-ins first, then the packages."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
import types
import zipfile
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from megazero.config.steps import Progress
from megazero.errors import ConfigError
from megazero.train.observe.monitors.base import CompositeMonitor
from megazero.train.observe.news.services import trackers_of
from tests.tables import over_table
from tests.train.samples import evaluation, step
from tests.train.test_monitors import config

NAMES = {
    "wandb": {"wandb_project": "p", "wandb_exp_name": "n", "wandb_save_dir": "d"},
    "mlflow": {"mlflow_experiment": "p", "mlflow_run_name": "n", "mlflow_tracking_uri": "d"},
    "comet_ml": {"comet_project": "p", "comet_experiment_name": "n", "comet_offline_dir": "d"},
    "trackio": {"trackio_project": "p", "trackio_run_name": "n", "trackio_dir": "d"},
}


class Service(types.ModuleType):
    """What the monitors use of all four packages; keeps what each run is told."""

    def __init__(self, name: str, refuse: bool = False):
        super().__init__(name)
        self.refuse, self.runs, self.asked = refuse, [], {}

    def _begin(self, **asked):
        if self.refuse:
            raise RuntimeError("no API key")
        assert all(run["ended"] for run in self.runs), "one run after the other"
        self.asked |= asked
        self.runs.append({"logged": [], "ended": False, "facts": {}, **asked})
        return self

    def init(self, project=None, name=None, **others):
        config = others.pop("config")
        self._begin(project=project, name=name, **others)
        self.runs[-1]["facts"] = config
        return self

    def start(self, **asked):
        return self._begin(**asked)

    def start_run(self, run_name):
        return self._begin(run_name=run_name)

    def set_experiment(self, name):
        self.asked["experiment"] = name

    def set_tracking_uri(self, uri):
        self.asked["uri"] = uri

    def ExperimentConfig(self, **fields):
        return fields

    def define_metric(self, name, step_metric=None):
        self.axis = step_metric

    def log_params(self, facts):
        assert len(facts) <= 100
        self.runs[-1]["facts"] |= facts

    def log_parameters(self, facts):
        self.runs[-1]["facts"] |= facts

    def log(self, values, step=None):
        if math.isnan(values.get("lm loss", 0.0)):
            raise RuntimeError("gone")
        values = dict(values)
        self.runs[-1]["logged"].append((step or values.pop(self.axis), values))

    log_metrics = log

    def finish(self):
        self.runs[-1]["ended"] = True

    end = end_run = finish


def monitor_of(package: str, monkeypatch, **service) -> tuple[CompositeMonitor, Service, list[str]]:
    fake = Service(package, **service)
    monkeypatch.setitem(sys.modules, package, fake)
    monkeypatch.setenv("TRACKIO_DIR", "before")
    asked, warnings = config(**NAMES[package]), []
    (kind,) = trackers_of(asked.logging)
    return CompositeMonitor([kind(asked)], warnings.append), fake, warnings


def charts(iteration: int, **fields) -> tuple[int, dict[str, float]]:
    consumed = {"consumed-samples": 8 * iteration, "consumed-tokens": 512 * iteration}
    return iteration, {**step(iteration, **fields).charts(with_timers=False), **consumed}


def train(monitor: CompositeMonitor) -> list[list[tuple[int, dict[str, float]]]]:
    """Train, go back once, and return what each of the two runs should have."""
    for iteration in (1, 2, 3):
        monitor.step(step(iteration, lm_loss=float(iteration)))
    monitor.evaluation(evaluation(3, lm_loss=0.0))
    monitor.rewound(Progress(2, 16, 1024))
    monitor.step(step(3, lm_loss=9.0))
    monitor.close()
    evaluated = (3, {"lm loss validation": 0.0, "lm loss validation ppl": 1.0})
    return [[*(charts(i, lm_loss=float(i)) for i in (1, 2, 3)), evaluated], [charts(3, lm_loss=9.0)]]


@over_table("package", list(NAMES))
def test_what_is_logged_is_what_the_charts_show_and_a_rollback_begins_another_run(package, monkeypatch):
    monitor, fake, warnings = monitor_of(package, monkeypatch)
    expected = train(monitor)
    assert [run["logged"] for run in fake.runs] == expected
    assert [run["ended"] for run in fake.runs] == [True, True]
    assert warnings == []
    facts = fake.runs[1]["facts"]
    assert (facts.get("model.hidden_size") or facts["model"]["hidden_size"]) == 8


def test_names_and_places_are_those_of_the_settings(monkeypatch):
    asked = {package: monitor_of(package, monkeypatch)[1].asked for package in NAMES}
    assert asked["wandb"] == {"project": "p", "name": "n", "entity": None, "group": None, "dir": "d"}
    assert asked["mlflow"] == {"uri": "d", "experiment": "p", "run_name": "n"}
    assert asked["trackio"] == {"project": "p", "name": "n", "embed": False}
    comet = asked["comet_ml"]
    assert (comet["project_name"], comet["workspace"], comet["online"]) == ("p", None, False)
    own = comet["experiment_config"]
    assert (own["name"], own["offline_directory"], own["parse_args"]) == ("n", "d", False)


def test_trackio_is_told_its_folder_before_it_is_imported(monkeypatch):
    monitor_of("trackio", monkeypatch)
    assert os.environ["TRACKIO_DIR"] == str(Path("d").absolute())


@over_table("package", list(NAMES))
def test_its_errors_only_turn_it_off(package, monkeypatch):
    monitor, _, warnings = monitor_of(package, monkeypatch)
    monitor.step(step(1, lm_loss=math.nan))
    (warning,) = warnings
    assert warning.endswith(f"Monitor is off from here on: {package} cannot log: gone")
    assert monitor.members == []


@over_table("package", list(NAMES))
def test_no_run_and_no_package_are_config_errors(package, monkeypatch):
    with pytest.raises(ConfigError, match=f"for p {package} says: no API key; .*, or leave the option out"):
        monitor_of(package, monkeypatch, refuse=True)
    monkeypatch.setitem(sys.modules, package, None)
    (kind,) = trackers_of(config(**NAMES[package]).logging)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        kind(config(**NAMES[package]))


def test_after_a_rollback_no_name_of_the_environment_is_resumed(monkeypatch):
    for package, says in (("wandb", {"resume": "never"}), ("comet_ml", {"mode": "create"})):
        monitor, fake, _ = monitor_of(package, monkeypatch)
        monitor.rewound(Progress(2, 16, 1024))
        assert says.items() <= fake.runs[1].items()
        assert not says.keys() & fake.runs[0].keys()


# Each package in a process of its own: they watch a process until it ends, and read their folder once.
REAL = """
import sys
from megazero.train.observe.monitors.base import CompositeMonitor
from megazero.train.observe.news.services import trackers_of
from tests.train.test_monitors import config
from tests.train.test_trackers import train
asked = config(**eval(sys.argv[1]))
monitor = CompositeMonitor([kind(asked) for kind in trackers_of(asked.logging)])
train(monitor)
assert len(monitor.members) == 1
"""
Kept = list[dict[str, list[tuple[int, float]]]]


def by_tag(run: list[tuple[int, dict[str, float]]]) -> dict[str, list[tuple[int, float]]]:
    """Tag -> [(iteration, value)]."""
    kept = defaultdict(list)
    for iteration, values in run:
        for tag, value in values.items():
            kept[tag].append((iteration, value))
    return dict(kept)


def in_mlflow(folder: Path) -> Kept:
    """What MLflow's own client reads of the runs, the first one first."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/m.db")
    (experiment,) = client.search_experiments(filter_string="name = 'p'")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
    assert [run.data.params["model.hidden_size"] for run in runs] == ["8", "8"]
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    return [
        {
            tag: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, tag)]
            for tag in run.data.metrics
        }
        for run in runs
    ]


def in_comet(folder: Path) -> Kept:
    """What the archives have, the first one first."""
    kept = []
    for path in sorted(folder.glob("*.zip"), key=lambda path: path.stat().st_mtime):
        lines = [json.loads(line) for line in zipfile.ZipFile(path).read("messages.json").splitlines()]
        metrics = [line["payload"]["metric"] for line in lines if line["type"] == "metric_msg"]
        run = [(m["step"], {m["metricName"]: float(m["metricValue"])}) for m in metrics]
        kept.append({tag: values for tag, values in by_tag(run).items() if not tag.startswith("sys.")})
    return kept


def in_trackio(folder: Path) -> Kept:
    """What the database has, the first run first."""
    with sqlite3.connect(folder / "p.db") as base:
        rows = base.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id").fetchall()
        assert base.execute(
            "SELECT count(*) FROM configs WHERE CAST(config AS TEXT) LIKE '%hidden_size%'"
        ).fetchone() == (2,)
    runs = dict.fromkeys(run for run, _, _ in rows)
    return [by_tag([(at, json.loads(values)) for run, at, values in rows if run == this]) for this in runs]


READERS = {
    "mlflow": ({"mlflow_tracking_uri": "sqlite:///{folder}/m.db"}, in_mlflow),
    "comet_ml": ({"comet_offline_dir": "{folder}"}, in_comet),
    "trackio": ({"trackio_dir": "{folder}"}, in_trackio),
}


@pytest.mark.slow
@pytest.mark.parametrize("package", list(READERS))
def test_the_package_keeps_what_the_charts_show(package, tmp_path, monkeypatch):
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    place, read = READERS[package]
    asked = NAMES[package] | {name: text.format(folder=tmp_path) for name, text in place.items()}
    subprocess.run([sys.executable, "-c", REAL, repr(asked)], check=True, timeout=300)
    with monkeypatch.context() as patched:
        expected = train(monitor_of(package, patched)[0])
    assert read(tmp_path) == [by_tag(run) for run in expected]
