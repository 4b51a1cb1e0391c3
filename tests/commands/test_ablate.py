"""`megazero ablate`: files, status, messages, and a real training that goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.ablate import picture, runs
from megazero.ablate.study import StudyOptions, read_study
from megazero.ablate.trial import records, trials_of
from megazero.commands import ablate as command
from megazero.commands.ablate import main
from tests.ablate.samples import quick_trainer, write_study


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runs, "_GLANCE", 0.05)


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures take as long as the rest of a test."""
    monkeypatch.setattr(picture, "draw", lambda findings, baseline, path, study, theme: path.write_bytes(b""))


def test_a_study_leaves_lines_a_table_and_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = write_study(tmp_path / "s", a="")
    (folder / "b.yaml").write_text("# Higher rate\nbase: base.yaml\noptimizer: {lr: 1}\n")
    out, trainer = tmp_path / "out", quick_trainer(tmp_path)
    flags = [str(folder), "--out", str(out), "--seeds", "2"]
    assert main([*flags, "--baseline", "b"], trainer) == 0
    assert [(r["configuration"], r["seed"]) for r in records(out / "results.jsonl")] == [
        *(("a", 1234), ("b", 1234), ("a", 1235), ("b", 1235)),
    ]
    table = (out / "results.md").read_text()
    assert "| a | 0.133" in table
    assert table.splitlines()[3].endswith("| 64 | 4.00 T | 2.00 s | 1 | 1 |")
    assert "- `b`: Higher rate" in table
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert table in shown
    assert shown.endswith(f"{out}: results.jsonl, results.md, results.png\n")


def test_a_failure_is_the_status_and_the_others_count(tmp_path, capsys, undrawn):
    folder = write_study(tmp_path / "s", a="", b="optimizer: {lr: 13}")
    assert main([str(folder), "--out", str(tmp_path / "out")], quick_trainer(tmp_path)) == 1
    told = capsys.readouterr()
    assert told.err.startswith(
        "error: 1 of the runs did not get to their end:\n  b, seed 1234: failed with status 1 ("
    )
    assert told.err.endswith("    a number is unlucky\n")
    assert "| a | 0.1334 |" in told.out


def test_the_table_grows_with_what_is_finished(tmp_path, capsys, undrawn):
    folder, trainer = write_study(tmp_path / "s", a="", b=""), quick_trainer(tmp_path)
    flags = [str(folder), "--out", str(tmp_path / "out")]
    assert main([*flags, "--only", "b"], trainer) == 0
    assert [record["configuration"] for record in records(tmp_path / "out/results.jsonl")] == ["b"]
    capsys.readouterr()
    assert main(flags, trainer) == 0
    assert [record["configuration"] for record in records(tmp_path / "out/results.jsonl")] == ["a", "b"]
    assert "b, seed 1234: was finished" in capsys.readouterr().out


def test_an_interrupted_study_says_so_and_keeps_what_is_finished(tmp_path, capsys, monkeypatch, undrawn):
    def interrupted(trials, board, trainer):
        runs.run_all(trials[:1], board, trainer)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_all", interrupted)
    folder, out = write_study(tmp_path / "s", a="", b=""), tmp_path / "out"
    assert main([str(folder), "--out", str(out)], quick_trainer(tmp_path)) == 130
    assert capsys.readouterr().err == "interrupted; run the command again to go on\n"
    assert len(records(out / "results.jsonl")) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--seeds", "0", "--nproc", "-1"],
            "error: `--seeds` must be at least 1, but is 0; raise it\n"
            "`--nproc` must be at least 1, but is -1; raise it\n",
        ),
        (["--only", "xyz"], "error: `--only` must name members (a), but is xyz; correct it.\n"),
        (["--baseline", "aa"], "error: `--baseline` must name members (a), but is aa; did you mean a?\n"),
        (["--", "--num-layrs", "2"], "error: a: unknown flag `--num-layrs`; did you mean `--num-layers`?\n"),
        (["--nproc", "3", "--", "--tensor-model-parallel-size", "2"], "error: a: "),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, capsys, flags, message):
    folder = write_study(tmp_path / "s", a="")
    cut = flags.index("--") if "--" in flags else len(flags)
    flags = [*flags[:cut], "--out", str(tmp_path / "out"), *flags[cut:]]
    assert main([str(folder), *flags]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_real_training_goes_on_where_it_was_stopped(tmp_path, capsys, undrawn):
    """The first half is stopped after two steps of four, in this process; the command finishes it."""
    from megazero.config.resolve import parse_config
    from megazero.train.pretraining import pretrain

    folder, out = write_study(tmp_path / "s", tiny=""), tmp_path / "out"
    (trial,) = trials_of(read_study(folder, StudyOptions()).members, 1, 1, out)
    trial.folder.mkdir(parents=True)
    trial.settings.write_text(command_settings(trial))
    pretrain(parse_config(["--config", str(trial.settings), "--exit-interval", "2"]).config)
    assert (trial.steps_done(), trial.finished()) == (2, False)
    assert main([str(folder), "--out", str(out)]) == 0
    assert "loaded" in trial.log.read_text()
    assert [record["iteration"] for record in records(trial.metrics)] == [1, 2, 3, 4]
    (line,) = map(json.loads, Path(out / "results.jsonl").read_text().splitlines())
    assert line["tokens"] == 4 * 2 * 8
    assert line["flops"] == pytest.approx(line["tokens"] * line["flops_per_token"], rel=1e-9)
    assert [milestone["iteration"] for milestone in line["curve"]] == [2, 4]
    assert 0 < line["seconds"] == line["curve"][-1]["seconds"]
    assert main([str(folder), "--out", str(out)], lambda trial: ["false"]) == 0
    assert "tiny, seed 1234: was finished, step 4/4" in capsys.readouterr().out


def command_settings(trial) -> str:
    from megazero.config.document import to_yaml

    return to_yaml(trial.config())
