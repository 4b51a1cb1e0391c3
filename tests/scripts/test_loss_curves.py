"""The quickstart's verdict and picture, from small metrics files."""

from __future__ import annotations

import json
import math

import pytest

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


def test_smoothing_averages_the_last_points():
    assert smoothed(((1, 4.0), (2, 2.0), (3, 6.0)), window=2) == [(1, 4.0), (2, 3.0), (3, 4.0)]


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


def test_the_picture_is_a_png(metrics, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "loss.png"
    assert plot_loss.main([str(metrics(5.5)), "--output", str(output), "--unigram-entropy", "6.58"]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_the_schedules_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "pacing.svg"
    plot_pacing.draw(output)
    assert "<svg" in output.read_text()
