"""`megazero incidents`: lists, pages and pictures of what guards found."""

from __future__ import annotations

import json

import pytest

from megazero.commands.incidents import incidents_figure, main, read_steps
from megazero.errors import ConfigError
from megazero.pictures.style import DARK, LIGHT, styled
from megazero.report.run_folder import find_metrics
from megazero.train.observe.incidents import Incident, IncidentLog, read_incidents
from megazero.train.observe.monitors.base import CompositeMonitor


@pytest.fixture
def run(tmp_path):
    log = IncidentLog(CompositeMonitor(), tmp_path / "run")
    (tmp_path / "run").mkdir()
    log.add(Incident("spike", 42, "loss 9, where 2 is usual", "rolled back", (), {"samples": [{"place": 3}]}))
    log.add(Incident("fault", 50, "rank 1 failed once", "went on", (1,)))
    return tmp_path / "run"


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"iteration": i, "sop_loss": 0.5, "lm_loss": 5.0 / i, "grad_norm": 1.0} for i in range(1, 60)]
    rows[41] = {"iteration": 42, "sop_loss": 0.5, "lm_loss": None, "grad_norm": 0.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_they_are_listed(run, capsys):
    assert main([str(run)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["number", "time", "iteration", "kind", "action", "ranks", "what"]
    assert rows[1][2:6] == ["42", "spike", "rolled", "back"]
    assert rows[2][2:7] == ["50", "fault", "went", "on", "1"]


def test_one_is_shown_whole(run, capsys):
    assert main([str(run), "--show", "0"]) == 0
    assert "samples:\n  place 3\n" in capsys.readouterr().out


def test_programs_read_json(run, capsys):
    assert main([str(run), "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["kind"], second["ranks"]) == ("spike", [1])


def test_a_run_without_any(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no incidents in {tmp_path}\n"


def test_steps_without_a_loss_are_left_out(metrics):
    steps = read_steps(metrics)
    assert (len(steps), steps[0], 42 in [step[0] for step in steps]) == (58, (1, 5.0, 1.0), False)


@pytest.mark.parametrize("with_metrics", [True, False])
def test_they_are_drawn(run, metrics, tmp_path, with_metrics, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    more = ["--metrics", str(metrics)] if with_metrics else []
    assert main([str(run), "--output", str(path), *more]) == 0
    assert path.stat().st_size > 5000
    assert f"drawn into {path}" in capsys.readouterr().out


def figure_of(run, theme=LIGHT, folder=None):
    pytest.importorskip("matplotlib")
    from tests.pictures.checks import complaints

    metrics = find_metrics(run)
    with styled(theme):
        figure = incidents_figure(
            read_incidents(folder or run), read_steps(metrics) if metrics else [], "mine", theme
        )
        assert complaints(figure, theme) == []
    return figure


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_metrics_in_the_folder_are_drawn_with_them(run, metrics, theme):
    metrics.rename(run / "metrics.jsonl")
    figure = figure_of(run, theme)
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss (nats)", "gradient norm (L2)", ""]
    assert [label.get_text() for label in figure.axes[2].get_yticklabels()] == ["spike", "fault"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["rolled back", "went on"]
    lines, marks = figure.axes[0].collections, figure.axes[2].collections
    assert [line.get_segments()[0][0][0] for line in lines] == [42, 50]
    dots = [mark for mark in marks if mark.get_label() in ("rolled back", "went on")]
    assert [dot.get_offsets().tolist() for dot in dots] == [[[42, 0]], [[50, 1]]]
    assert len({dot.get_facecolor().tobytes() for dot in dots}) == 2
    assert len({dot.get_paths()[0].vertices.tobytes() for dot in dots}) == 2


def test_no_panel_is_empty(run, metrics, tmp_path):
    assert len(figure_of(run).axes) == 1  # no metrics: the events alone
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    metrics.rename(quiet / "metrics.jsonl")
    figure = figure_of(quiet)
    assert len(figure.axes) == 2
    assert "no incidents" in [text.get_text() for text in figure.texts]


def test_neither_incidents_nor_metrics_are_no_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main([str(tmp_path), "--output", str(tmp_path / "a.png")]) == 2
    assert "`--metrics` must be a file with steps if there are no incidents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--show", "2"], "`--show` must be the number of an incident, of 2"),
        (["--metrics", "x.jsonl"], "`--output` must be set"),
        (
            ["--metrics", "nowhere.jsonl", "--output", "a.png"],
            "`--metrics` must be a file that can be read, but nowhere.jsonl: No such file",
        ),
    ],
)
def test_wrong_flags_are_refused(run, capsys, flags, said):
    assert main([str(run), *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_is_none(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "must be a run's folder, but is none" in capsys.readouterr().err


def test_a_line_that_is_still_being_written_is_left_out(metrics):
    with metrics.open("a") as file:
        file.write('{"iteration": 60, "lm_l')
    assert len(read_steps(metrics)) == 58


def test_metrics_that_are_none(tmp_path):
    (tmp_path / "x.jsonl").write_text("[1]\n")
    with pytest.raises(
        ConfigError, match=r"must be a file of metrics, but line 1 of .* is not an object with an"
    ):
        read_steps(tmp_path / "x.jsonl")
