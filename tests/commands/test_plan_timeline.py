"""Timelines as text and trace."""

from __future__ import annotations

import json

from megazero.commands.plan.timeline import chrome_trace, render_text
from megazero.pipeline.lower import lower
from megazero.pipeline.schedules import one_f_one_b, zb_h1, zb_v
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
