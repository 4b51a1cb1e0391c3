"""Timelines as text, trace and picture."""

from __future__ import annotations

import json
import sys

import pytest

from megazero.commands.plan.timeline import COLOURS, chrome_trace, draw, figure_of, render_text
from megazero.errors import ConfigError
from megazero.pipeline.lower import lower
from megazero.pipeline.schedules import interleaved, one_f_one_b, zb_h1, zb_v
from megazero.pipeline.simulate import Costs, simulate


def test_text():
    assert render_text(simulate(one_f_one_b(2, 2))) == (
        "stage 0 | F0 F1 .  .  B0 -  .  B1 -\nstage 1 | .  F0 B0 -  F1 B1 -  .  ."
    )


def test_text_names_the_chunk_where_a_stage_has_several():
    assert render_text(simulate(zb_v(1, 1))) == "stage 0 | F0.0 F1.0 I1.0 W1.0 I0.0 W0.0"


def test_the_cell_is_the_common_measure_of_all_times():
    assert render_text(simulate(one_f_one_b(1, 2), Costs(forward=0.2, backward=0.3))) == (
        "stage 0 | F0 -  B0 -  -  F1 -  B1 -  -"
    )


def test_times_without_a_common_measure_are_rounded_to_the_shortest():
    grid = render_text(simulate(one_f_one_b(1, 3), Costs(forward=0.1234567, backward=0.2812345)))
    assert grid == "stage 0 | F0 B0 -  F1 B1 -  -  F2 B2 -"


def test_what_takes_no_time_has_no_cell():
    assert render_text(simulate(zb_h1(1, 2), Costs(weight=0))) == "stage 0 | F0 I0 F1 I1"


def test_stage_numbers_line_up():
    rows = render_text(simulate(one_f_one_b(11, 1))).splitlines()
    assert {row.index("|") for row in rows} == {9}


def test_trace_has_a_thread_per_stage_and_times_in_microseconds():
    trace = chrome_trace(simulate(one_f_one_b(2, 1)))
    assert json.loads(json.dumps(trace)) == trace
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["stage 0", "stage 1"]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"]) for e in spans] == [
        ("F0.0", "forward", 0, 0, 1e6),
        ("B0.0", "backward", 0, 4e6, 2e6),
        ("F1.0", "forward", 2, 1e6, 1e6),
        ("B1.0", "backward", 2, 2e6, 2e6),
    ]
    assert {event["pid"] for event in trace["traceEvents"]} == {0}


def test_trace_of_collectives_is_a_thread_beside_the_stage():
    program = lower(one_f_one_b(1, 1), gather=True, reduce_every_microbatch=False)
    events = chrome_trace(simulate(program, Costs(gather=2, reduce=3)))["traceEvents"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("F0.0", 0, 2e6, 1e6),
        ("B0.0", 0, 3e6, 2e6),
        ("G0.0", 1, 0, 2e6),
        ("S0.0", 1, 3e6, 3e6),
    ]


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), interleaved(2, 4, 3), zb_h1(2, 3), zb_v(2, 3)])
def test_picture_has_a_numbered_box_per_action(schedule):
    pytest.importorskip("matplotlib")
    timeline = simulate(schedule)
    axes = figure_of(timeline).axes[0]
    boxes = sorted((round(p.get_y() + p.get_height() / 2), p.get_x(), p.get_width()) for p in axes.patches)
    spans = [(stage, s.start, s.end - s.start) for stage, row in enumerate(timeline.spans) for s in row]
    assert boxes == [pytest.approx(span) for span in sorted(spans)]
    assert axes.get_xlim() == (0.0, timeline.makespan)
    assert axes.get_ylim() == (schedule.stages - 0.5, -0.5)  # whole rows, the first stage on top
    numbers = [text.get_text() for text in axes.texts]
    assert numbers == [str(s.action.microbatch) for row in timeline.spans for s in row]
    legend = axes.figure.legends[0].get_texts()
    ops = {s.action.op for row in timeline.spans for s in row}
    assert len(legend) == len(ops) * schedule.chunks_per_stage
    assert len({p.get_facecolor() for p in axes.patches}) == len(legend)


def test_picture_of_many_actions_has_no_numbers():
    pytest.importorskip("matplotlib")
    assert list(figure_of(simulate(one_f_one_b(1, 300))).axes[0].texts) == []


def test_colours_tell_operations_apart():
    assert len(set(COLOURS.values())) == len(COLOURS)


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_picture_is_written_in_the_format_of_its_suffix(tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"timeline.{suffix}"
    draw(simulate(one_f_one_b(2, 2)), path)
    assert path.read_bytes().startswith(start)


def test_other_suffixes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"end in one of .png, .svg, .pdf, but is timeline.gif"):
        draw(simulate(one_f_one_b(2, 2)), tmp_path / "timeline.gif")


def test_a_missing_matplotlib_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="matplotlib must be installed .*`pip install matplotlib`"):
        draw(simulate(one_f_one_b(2, 2)), tmp_path / "timeline.png")
