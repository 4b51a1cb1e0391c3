"""A study is drawn again from the lines that it left."""

from __future__ import annotations

import math

import pytest

from megazero.ablate.results import EvaluationPoint, RunResult, grouped, write_lines
from megazero.ablate.sizes import ModelSize
from scripts import plot_study
from scripts.plot_study import read_lines

pytest.importorskip("matplotlib")


def results(*names: str) -> list[RunResult]:
    curve = tuple(EvaluationPoint(step, 10.0 * step, 1e6 * step, 0.5 * step, 9.0 / step) for step in (1, 2))
    return [RunResult(name, "T", 1, 1, "f", ModelSize(5, 4, 6.0), curve) for name in names]


def test_lines_read_back_as_they_were(tmp_path):
    written = results("a", "b@0.5")
    write_lines(written, tmp_path / "r.jsonl")
    assert read_lines(tmp_path / "r.jsonl") == grouped(written)
    write_lines(
        [RunResult("a", "", 1, 1, "f", ModelSize(5, 4, 6.0), (EvaluationPoint(1, 1, 1, 1, math.nan),))],
        tmp_path / "n.jsonl",
    )
    assert math.isnan(read_lines(tmp_path / "n.jsonl")[0].curve[0].loss)


def test_a_study_is_drawn_or_refused(tmp_path, capsys, monkeypatch):
    write_lines(results("a", "b"), tmp_path / "r.jsonl")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "other.jsonl").write_text('{"iteration": 1}\n')
    drawn: list[tuple[str, str, str]] = []
    monkeypatch.setattr(
        plot_study, "draw", lambda found, base, path, name, theme: drawn.append((base, name, theme.name))
    )
    output = ["--output", str(tmp_path / "a.png")]
    assert plot_study.main([str(tmp_path / "r.jsonl"), *output, "--theme", "dark"]) == 0
    assert plot_study.main([str(tmp_path / "r.jsonl"), *output, "--baseline", "b", "--name", "A study"]) == 0
    assert drawn == [("a", "r", "dark"), ("b", "A study", "light")]
    for flags, message in (
        (["r.jsonl", "--baseline", "c"], "`--baseline` must be one of a, b, but is c"),
        (["empty.jsonl"], "must hold a run"),
        (["other.jsonl"], "must be what `megazero ablate` wrote"),
        (["absent.jsonl"], "must be what `megazero ablate` wrote"),
    ):
        assert plot_study.main([str(tmp_path / flags[0]), *flags[1:], *output]) != 0
        assert message in capsys.readouterr().err
