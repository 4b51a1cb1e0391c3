"""What the page knows of a run: its numbers are the metrics', no spike is lost, its state is told."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest

from megazero.errors import DataError
from megazero.report.run import BINS, Source, reduced
from megazero.report.run_folder import SAMPLES, add_samples, run_name
from tests.report.samples import record, start, write


def read(folder, **rest) -> dict:
    return Source.of(folder, **rest).read()


def test_a_short_run_is_shown_number_by_number(tmp_path):
    steps = [record(i, lm_loss=1 / 3 + i, extra=i * 0.1) for i in range(1, 50)]
    steps[4] |= {"lm_loss": None, "skipped": True, "grad_norm": "Infinity"}
    shown = read(write(tmp_path, steps))["steps"]
    assert shown["count"] == 49
    assert shown["x"]["steps"] == list(range(1, 50))
    assert shown["x"]["tokens"] == [64 * i for i in range(1, 50)]
    assert shown["x"]["hours"] == pytest.approx([0.5 * i / 3600 for i in range(1, 50)])
    for name in ("lm_loss", "learning_rate", "extra"):
        assert shown["series"][name] == {"mean": [step[name] for step in steps]}
    assert shown["series"]["phase_seconds.data"] == {"mean": [0.1] * 49}
    assert shown["series"]["grad_norm"]["mean"][4] is None
    assert shown["skipped"] == [5]


def test_a_step_that_was_passed_over_has_no_rate(tmp_path):
    steps = [record(1), record(2, tokens_per_second=1e9, phase_seconds={}), record(3)]
    assert read(write(tmp_path, steps))["steps"]["series"]["tokens_per_second"] == {
        "mean": [128.0, None, 128.0]
    }


@pytest.mark.parametrize("place", [0, 1, 4999, 7777, 12345])
def test_no_spike_of_a_long_run_is_lost(tmp_path, place):
    losses = 2 + np.random.Generator(np.random.Philox(key=place)).random(12346) / 10
    losses[place] = 50.0
    losses[place // 2] = -50.0 if place > 1 else losses[0]
    lines = "".join(f'{{"iteration": {i + 1}, "lm_loss": {x!r}}}\n' for i, x in enumerate(losses.tolist()))
    (tmp_path / "metrics.jsonl").write_text(lines)
    steps = read(tmp_path)["steps"]
    series = steps["series"]["lm_loss"]
    assert {len(series[kind]) for kind in ("mean", "low", "high")} == {BINS}
    bins = np.array_split(losses, BINS)
    assert max(series["high"]) == 50.0
    assert steps["x"]["steps"][series["high"].index(50.0)] >= place + 1
    starts = np.linspace(0, len(losses), BINS, endpoint=False).astype(int)
    bins = np.split(losses, starts[1:])
    assert series["low"] == [part.min() for part in bins]
    assert series["high"] == [part.max() for part in bins]
    assert series["mean"] == pytest.approx([part.mean() for part in bins])


def test_a_bin_is_of_finite_values_alone():
    column = np.array([1.0, np.nan, 3.0, np.nan, np.nan, np.inf, -np.inf, 7.0])
    starts = np.array([0, 3, 5])
    assert reduced(column, starts) == {
        "mean": [2.0, None, 7.0],
        "low": [1.0, None, 7.0],
        "high": [3.0, None, 7.0],
    }


def test_evaluations_incidents_samples_and_a_plan_are_found(tmp_path):
    folder = write(
        tmp_path / "a", [record(1)], eval=[{"iteration": 1, "split": "validation", "lm_loss": 3.0}]
    )
    (folder / "incidents").mkdir()
    incident = {"kind": "spike", "iteration": 1, "summary": "</script>", "action": "none", "ranks": []}
    (folder / "incidents/0.json").write_text(json.dumps(incident))
    (folder / "incidents/1.json").write_text("{")
    (folder / "plan.json").write_text('{"seconds_per_step": 2.0}')
    add_samples(folder, 7, [("once", " upon")])
    shown = read(folder)
    assert shown["evaluations"][0]["lm_loss"] == 3.0
    assert shown["incidents"] == [incident]
    assert shown["plan"] == {"seconds_per_step": 2.0}
    assert [(s["iteration"], s["prompt"], s["text"]) for s in shown["samples"]] == [(7, "once", " upon")]
    assert shown["damage"] == [
        f"{folder}/incidents/1.json is left out: Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1)"
    ]
    assert (folder / SAMPLES).exists()


def test_incidents_are_looked_for_where_the_run_saved(tmp_path):
    saved = tmp_path / "saved"
    (saved / "incidents").mkdir(parents=True)
    (saved / "incidents/0.json").write_text('{"kind": "spike"}')
    folder = write(tmp_path / "a", [record(1)], run=[start(checkpoint={"save": str(saved)})])
    assert read(folder)["incidents"] == [{"kind": "spike"}]


def test_experts_and_memory_are_read_from_their_lines(tmp_path):
    loads = [{"layer": 1, "tokens": [1, 3]}, {"layer": 2, "tokens": [0, 0]}]
    steps = [record(i, **({"tokens_per_expert": loads} if i % 2 == 0 else {})) for i in range(1, 9)]
    steps[0]["memory"] = [{"device": {"weights": 5}}]
    shown = read(write(tmp_path, steps))
    assert shown["experts"]["steps"] == [2, 4, 6, 8]
    assert shown["experts"]["layers"] == [1, 2]
    assert shown["experts"]["shares"] == [[[0.5, 1.5], [0.0, 0.0]]] * 4
    assert shown["memory"] == [{"device": {"weights": 5}}]


END = {"event": "end", "time": "2030-01-02T04:00:00Z", "iteration": 100, "state": "finished", "reason": None}


@pytest.mark.parametrize(
    ("events", "old", "word"),
    [
        ([], False, "running"),
        ([], True, "idle"),
        ([start()], True, "silent"),
        ([start()], False, "running"),
        ([start(), END], True, "finished"),
        ([start(), {**END, "state": "failed", "reason": "NumericsError: x"}], True, "failed"),
        ([start(), END, start(50, end=200)], False, "running"),
    ],
)
def test_the_state_of_a_run(tmp_path, events, old, word):
    for event in events:
        event["time"] = "2020-01-01T00:00:00Z"
    folder = write(tmp_path, [record(i) for i in range(1, 101)], run=events)
    if old:
        os.utime(folder / "metrics.jsonl", (0, time.time() - 4000))
    state = read(folder)["state"]
    assert state["word"] == word
    assert state["at"] == 100
    if word == "failed":
        assert state["why"] == "NumericsError: x"
    if word == "running" and len(events) == 3:
        assert state["eta"] == 0.5 * 100


def test_a_forecast_goes_on_as_the_latest_half_did(tmp_path):
    """A loss that falls with the logarithm of the steps is foreseen to the digit; a bend is not hidden."""
    steps = [record(i, total_loss=8 - np.log(i) if i > 100 else 1.0) for i in range(1, 401)]
    forecast = read(write(tmp_path, steps, run=[start(end=1000)]))["forecast"]
    assert forecast["value"] == pytest.approx(8 - np.log(1000))
    assert forecast["spread"] == pytest.approx(0, abs=1e-9)
    assert read(write(tmp_path, steps, run=[start(end=400)]))["forecast"] is None


@pytest.mark.parametrize(
    ("steps", "files", "said"),
    [
        ([record(1, tokens_per_expert=[{"layer": 1}])], {}, "`tokens_per_expert` is not understood"),
        ([record(1)], {"run": [{**start(), "end": [1]}]}, "a start whose facts are not understood"),
        ([record(1)], {"eval": [[1]]}, "line 1 is left out: it is no object"),
    ],
)
def test_facts_of_another_form_are_named(tmp_path, steps, files, said):
    shown = read(write(tmp_path, steps, **files))
    assert said in shown["damage"][0]
    assert len(shown["damage"]) == 1
    assert shown["steps"]["count"] == 1


def test_the_name_of_a_run_is_its_folders_or_its_files(tmp_path):
    (tmp_path / "metrics-of-two").mkdir()
    assert run_name(tmp_path / "metrics-of-two") == "metrics-of-two"
    assert run_name(tmp_path / "metrics-of-two/metrics.jsonl") == "metrics-of-two"
    assert run_name(tmp_path / "metrics-of-two/iter_0000030") == "metrics-of-two"
    assert run_name(tmp_path / "other.jsonl") == "other"


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(
        DataError, match=r"must be a folder with a run's metrics, but .* has none; name the file"
    ):
        read(tmp_path)
    (tmp_path / "text.jsonl").write_text("hello\n")
    with pytest.raises(DataError, match=r"must be a file of metrics, but .*line 1 is not JSON"):
        read(tmp_path / "text.jsonl")
    with pytest.raises(DataError, match="No such file"):
        read(tmp_path / "none.jsonl")


def test_a_plan_that_is_none_is_refused(tmp_path):
    folder = write(tmp_path, [record(1)])
    for plan in (tmp_path / "missing.json", folder / "metrics.jsonl"):
        with pytest.raises(
            DataError, match=r"`--plan` must be what `megazero plan --output` wrote, but .* is not"
        ):
            read(folder, plan=plan)
    (tmp_path / "p.json").write_text('{"seconds_per_step": 3.0}')
    assert read(folder, plan=tmp_path / "p.json")["plan"] == {"seconds_per_step": 3.0}


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    assert read(write(tmp_path, [], run=[start()]))["steps"]["count"] == 0
