"""A run keeps its metrics in its folder and writes down its starts and its end; the folder stays a run's."""

from __future__ import annotations

import json
import os

import pytest

import megazero.train.run_record as module
from megazero.checkpoint.folder import iteration_folder
from megazero.commands.checkpoint import main as checkpoint_verb
from megazero.commands.report import main as report
from proofs.fault_matrix.runs import Setting, train
from tests.report.samples import data_of

FLAGS = "--global-batch-size 8 --train-iters 6 --save-interval 2"


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_reported_without_preparation(tmp_path, capsys):
    """It stops, a damaged file of metrics does not keep it from going on, and all verbs take its folder."""
    folder = tmp_path / "run"
    where = Setting.of(tp=2)
    assert train(where, folder, f"{FLAGS} --exit-interval 4").status == 0
    assert [step["iteration"] for step in lines(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("rubbish\n")
    resumed = train(where, folder, f"{FLAGS} --load {folder}")
    assert resumed.saved == (2, 4, 6)
    assert "warning: metrics begin anew, " in resumed.printed
    (aside,) = folder.glob("metrics.jsonl.damaged-*")
    assert len(lines(folder / "metrics.jsonl")) == 2
    aside.replace(folder / "metrics.jsonl")
    events = lines(folder / "metrics.run.jsonl")
    starts = [event for event in events if event["event"] == "start"]
    assert [start["iteration"] for start in starts] == [0, 4]
    assert [(e["state"], e["iteration"]) for e in events if e["event"] == "end"] == [
        ("stopped", 4),
        ("finished", 6),
    ]
    first = starts[0]
    assert first["world_size"] == 2
    assert sum(first["hosts"].values()) == 2
    assert {axis: first["layout"][axis] for axis in ("tp", "pp", "dp")} == {"tp": 2, "pp": 1, "dp": 1}
    assert first["end"]["iteration"] == 6
    # Embeddings of 64 tokens and 16 positions, two layers of 12 h^2 + 13 h, a last norm; h is 16.
    assert first["parameters"] == 64 * 16 + 16 * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16
    assert (
        first["settings"]["checkpoint.save_interval"] == first["config"]["checkpoint"]["save_interval"] == 2
    )
    for verb in (
        ["inspect", str(folder)],
        ["verify", str(folder)],
        ["prune", str(folder), "--keep-last", "1"],
    ):
        assert checkpoint_verb(verb) == 0, verb
    assert (folder / "metrics.jsonl").exists()
    assert iteration_folder(folder, 6).exists()
    assert report([str(folder)]) == 0
    (run,) = data_of((folder / "report.html").read_text())["runs"]
    assert (run["state"]["word"], run["steps"]["x"]["steps"]) == ("finished", [1, 2, 3, 4])
    assert len(run["memory"]) == 2


def test_a_failure_and_a_file_of_ones_own_are_recorded(tmp_path):
    metrics = tmp_path / "mine.jsonl"
    train(
        Setting.of(), tmp_path / "run", f"{FLAGS} --lr 1e30 --max-skipped-updates 1 --metrics-jsonl {metrics}"
    )
    end = lines(tmp_path / "mine.run.jsonl")[-1]
    assert (end["event"], end["state"]) == ("end", "failed")
    assert end["reason"].startswith("NumericsError: ")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_second_job_that_is_refused_leaves_the_metrics_alone(tmp_path):
    folder = tmp_path / "run"
    train(Setting.of(), folder, FLAGS)
    before = (folder / "metrics.jsonl").read_bytes()
    from megazero.checkpoint.lock import WriterLock

    lock = WriterLock(folder)
    assert train(Setting.of(), folder, FLAGS).status == 1
    lock.release()
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert sorted(os.listdir(folder)) == sorted({*os.listdir(folder)} - {"metrics.jsonl.1"})


@pytest.mark.parametrize(
    ("name", "value", "recorded"),
    [
        ("hidden_size", 64, 64),
        ("tokenizer_type", "x", "x"),
        ("train_tokens", 5, 5),
        ("auth_token", "abc", module.HIDDEN),
        ("wandb_api_key", "abc", module.HIDDEN),
        ("notify", "https://hooks.example.com/services/T0/B0/secret", "https://hooks.example.com/..."),
        ("data_path", ["s3://me:word@bucket/a?key=1"], ["s3://bucket/..."]),
        ("api_key", None, None),
    ],
)
def test_no_secret_is_recorded(name, value, recorded):
    assert module._shown(name, value) == recorded


def test_no_secret_of_a_command_line_is_recorded(monkeypatch):
    words = [
        "python",
        "x.py",
        "--api-key",
        "abc",
        "--password=abc",
        "--train-tokens",
        "5",
        "https://a.b/abc?x=abc,abc",
        "--notify=http://c.d/abc",
    ]
    monkeypatch.setattr("sys.orig_argv", words)
    shown = module._command()
    assert "abc" not in shown
    assert "--train-tokens 5" in shown
    assert "https://a.b/... --notify=http://c.d/..." in shown
