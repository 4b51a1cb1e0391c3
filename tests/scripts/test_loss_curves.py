"""The quickstart's verdict and picture, from small metrics files."""

from __future__ import annotations

import json
import math

import pytest

from megazero.pictures import style
from megazero.pictures.style import DARK, LIGHT
from scripts import compare_loss, plot_loss, plot_pacing
from scripts.loss_curves import read_curves, smoothed


@pytest.fixture
def metrics(tmp_path):
    """Writes training losses 9, 8, 7, ... and these validation losses; gives the path."""

    def write(*validation, steps=120):
        path = tmp_path / "m.jsonl"
        training = [{"iteration": i, "lm_loss": 10.0 - i / 100} for i in range(1, steps + 1)]
        records = [{"iteration": steps, "split": "validation", "lm_loss": loss} for loss in validation]
        records.append({"iteration": steps, "split": "test", "lm_loss": 0.0})
        path.write_text("".join(json.dumps(each) + "\n" for each in training))
        (tmp_path / "m.eval.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        return path

    return write


def test_curves_hold_training_and_validation_but_not_the_test_split(metrics):
    curves = read_curves(metrics(5.5, steps=2))
    assert curves.training == ((1, 9.99), (2, 9.98))
    assert curves.validation == ((2, 5.5),)


def test_a_mean_is_of_the_points_around():
    points = tuple(enumerate((4.0, 2.0, 6.0, 1.0, 2.0)))
    assert smoothed(points, window=1) == list(points)
    assert smoothed(points, window=3) == [(0, 4.0), (1, 4.0), (2, 3.0), (3, 3.0), (4, 2.0)]
    straight = tuple((float(i), 100.0 - i) for i in range(100))
    assert smoothed(straight, window=9) == list(straight[2:-2])  # a mean that trails is above what falls
    assert smoothed(((1, 4.0), (2, math.nan), (3, 6.0)), window=3)[1] == (2, 5.0)


def test_curves_say_what_was_spent_and_on_what(tmp_path):
    path = tmp_path / "m.jsonl"
    steps = [{"iteration": i, "lm_loss": 2.0, "consumed_tokens": 10 * i, "seconds": 1800} for i in (1, 2)]
    steps[0]["memory"] = [{}, {}]
    steps.append({**steps[1], "lm_loss": "NaN"})  # a step that was repeated
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    curves = read_curves(path)
    assert curves.spent == {"tokens": {1: 10, 2: 20}, "hours": {1: 0.5, 2: 1.0}}
    assert (curves.training[0], len(curves.training)) == ((1, 2.0), 2)
    assert math.isnan(curves.training[1][1])
    assert curves.layout == "ranks: 2"
    start = {
        "event": "start",
        "world_size": 4,
        "device": "a CPU",
        "layout": {"pp": 1, "dp": 2, "tp": 2, "zero_stage": 1},
    }
    (tmp_path / "m.run.jsonl").write_text(json.dumps(start) + "\n" + json.dumps({"event": "end"}) + "\n")
    assert read_curves(path).layout == "ranks: 4 (dp 2, tp 2, ZeRO stage 1) on a CPU"
    assert (
        plot_loss.about(read_curves(path))
        == "ranks: 4 (dp 2, tp 2, ZeRO stage 1) on a CPU; 2 steps; 20 tokens"
    )


@pytest.mark.parametrize(
    ("loss", "status", "words"),
    [
        (5.5, 0, "passed: 1.0800 nats below"),
        (6.2, 1, "FAILED: 0.3800 nats below"),
        ("NaN", 1, "FAILED: nan nats below"),
    ],
)
def test_a_loss_is_judged_by_its_distance_to_the_entropy(metrics, capsys, loss, status, words):
    assert compare_loss.main([str(metrics(loss)), "--unigram-entropy", "6.58"]) == status
    assert words in capsys.readouterr().out


def test_a_short_training_is_shown_but_not_judged(metrics, capsys):
    arguments = [str(metrics(9.0, steps=20)), "--unigram-entropy", "6.58", "--judge-from-step", "100"]
    assert compare_loss.main(arguments) == 0
    assert "not judged" in capsys.readouterr().out


def test_the_last_evaluation_counts(metrics):
    assert compare_loss.main([str(metrics(2.0, 9.0)), "--unigram-entropy", "6.58"]) == 1


def test_no_evaluation_is_an_error(metrics, capsys):
    assert compare_loss.main([str(metrics()), "--unigram-entropy", "6.58"]) == 1
    assert "must have an evaluation" in capsys.readouterr().err


def test_no_number_is_never_below():
    assert not compare_loss.verdict(math.nan, 6.58, 1.0)


@pytest.fixture
def drawn(monkeypatch):
    """Hold every figure that is saved to what is asked of pictures; gives the complaints."""
    pytest.importorskip("matplotlib")
    from tests.pictures.checks import complaints

    wrong = []

    def looked_at(figure, path):
        theme = DARK if figure.get_facecolor()[0] < 0.5 else LIGHT
        wrong.extend(complaints(figure, theme))
        style.save(figure, path)

    for module in (plot_loss, plot_pacing):
        monkeypatch.setattr(module, "save", looked_at)
    return wrong


@pytest.mark.parametrize(("theme", "axis"), [("light", "tokens"), ("dark", "hours")])
def test_a_loss_is_drawn_so_that_it_can_be_read(metrics, tmp_path, drawn, theme, axis):
    path, output = metrics(5.5), tmp_path / "loss.png"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    spent = [{**each, "consumed_tokens": 1e6 * each["iteration"], "seconds": 60} for each in records]
    path.write_text("".join(json.dumps(each) + "\n" for each in spent))
    flags = ["--output", str(output), "--unigram-entropy", "9.5", "--theme", theme, "--x-axis", axis]
    assert plot_loss.main([str(path), *flags]) == 0
    assert drawn == []
    assert output.read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_cannot_be_drawn_is_refused(metrics, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, output = metrics(5.5), tmp_path / "loss.png"
    broken, absent = tmp_path / "broken.jsonl", tmp_path / "absent.jsonl"
    broken.write_text('{"iteration": 1}\n')
    for flags, message in (
        ([str(path), "--x-axis", "tokens"], "one that the metrics have (steps), but is tokens"),
        ([str(broken)], "must be what `--metrics-jsonl` wrote"),
        ([str(absent)], "must be a file of metrics"),
    ):
        assert plot_loss.main([*flags, "--output", str(output)]) != 0
        assert message in capsys.readouterr().err
    assert not output.exists()


def test_a_run_is_named_by_its_file_or_its_folder(tmp_path):
    assert plot_loss.name_of(tmp_path / "big.jsonl") == "big"
    assert plot_loss.name_of(tmp_path / "small" / "metrics.jsonl") == "small"


def test_the_schedules_are_drawn(tmp_path, drawn):
    output = tmp_path / "pacing.svg"
    assert plot_pacing.main(["--output", str(output), "--theme", "dark"]) == 0
    assert drawn == []
    assert "<svg" in output.read_text()
