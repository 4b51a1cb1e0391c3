"""Incidents: told, written twice, and read back."""

from __future__ import annotations

import json
import math

import pytest

from megazero.errors import CheckpointError
from megazero.train.observe.incidents import FOLDER, Incident, IncidentLog, read_incidents
from megazero.train.observe.monitors.base import Monitor
from tests.tables import over_table

SPIKE = Incident(
    "spike",
    42,
    "loss 9, where 2 is usual",
    "rolled back",
    (1,),
    {"norms": {"layers.0": 1.5, "layers.1": math.inf}, "samples": [{"place": 3, "sample": 7}]},
)


class Heard(Monitor):
    """Keeps what it is told."""

    def __init__(self):
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def test_an_incident_is_told_and_written(tmp_path):
    heard = Heard()
    log = IncidentLog(heard, tmp_path)
    log.add(SPIKE)
    log.add(Incident("fault", 50, "rank 1 failed once", "went on", (1,)))
    names = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert names == [
        "0000-0000042-spike.json",
        "0000-0000042-spike.txt",
        "0001-0000050-fault.json",
        "0001-0000050-fault.txt",
    ]
    assert heard.texts[0] == (
        "incident at iteration 42: spike: loss 9, where 2 is usual; the run went back to a checkpoint; "
        f"see {tmp_path / FOLDER / '0000-0000042-spike.txt'}"
    )
    page = (tmp_path / FOLDER / names[1]).read_text().splitlines()
    assert page[:3] == [
        "Incident at iteration 42: spike",
        "  loss 9, where 2 is usual",
        "  the run went back to a checkpoint",
    ]
    assert page[3].endswith(", on rank 1")
    assert page[4:] == [
        "",
        "norms:",
        "  layers.0 1.5, layers.1 inf",
        "",
        "samples:",
        "  place 3, sample 7",
    ]
    first, second = read_incidents(tmp_path)
    assert (first["kind"], first["iteration"], first["ranks"]) == ("spike", 42, [1])
    assert first["details"]["norms"] == {"layers.0": 1.5, "layers.1": "Infinity"}
    assert second["action"] == "went on"


def test_a_folder_that_cannot_be_written_costs_no_training(tmp_path):
    (tmp_path / FOLDER).write_text("in the way")
    heard = Heard()
    IncidentLog(heard, tmp_path).add(SPIKE)
    assert "it could not be written down" in heard.texts[0]


def test_ranks_without_a_folder_write_nothing(tmp_path):
    IncidentLog(Heard(), None).add(SPIKE)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_incidents_has_none(tmp_path):
    assert read_incidents(tmp_path) == []
    with pytest.raises(CheckpointError, match="must be a run's folder, but is none"):
        read_incidents(tmp_path / "nowhere")


@over_table("content", ["{", "[]", json.dumps({"kind": "spike"}), "[" * 100_000])
def test_a_file_that_is_no_incident_is_named(tmp_path, content):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "0000-x.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"0000-x.json` must hold an incident"):
        read_incidents(tmp_path)
