"""Timelines: durations, transfers, gathers and reductions, and schedules that cannot finish."""

from __future__ import annotations

import pytest

from megazero.errors import ConfigError, MegazeroError
from megazero.pipeline.actions import Program, Schedule, ScheduleError
from megazero.pipeline.lower import add_gathers, add_transfers, lower
from megazero.pipeline.schedules import one_f_one_b, zb_h1, zb_v
from megazero.pipeline.simulate import Costs, simulate
from tests.pipeline.samples import FAMILIES, action, gaps, schedules
from tests.tables import over_table


def starts(timeline) -> list[list[float]]:
    return [[span.start for span in spans] for spans in timeline.spans]


def test_durations():
    timeline = simulate(one_f_one_b(2, 2))
    assert starts(timeline) == [[0, 1, 4, 7], [1, 2, 4, 5]]
    assert timeline.makespan == 9
    assert timeline.busy == (6, 6)
    assert timeline.bubble == pytest.approx(1 / 3)
    assert gaps(timeline) == (3, 0)


def test_costs_are_of_a_stage_or_of_each_chunk():
    halves = simulate(zb_v(1, 1), Costs(forward=2, input=4, weight=6))
    assert starts(halves) == [[0, 1, 2, 4, 7, 9]]
    uneven = simulate(zb_v(1, 1), Costs(forward=(1, 2), input=(3, 4), weight=(5, 6)))
    assert starts(uneven) == [[0, 1, 3, 7, 13, 16]]
    assert uneven.makespan == 21


def test_costs_by_chunk_must_be_one_each():
    with pytest.raises(ConfigError, match="each of the 2 chunks, but are 3"):
        simulate(one_f_one_b(2, 1), Costs(forward=(1, 1, 1)))


@pytest.mark.parametrize("lowered", [False, True])
def test_a_transfer_delays_what_needs_it(lowered):
    schedule = one_f_one_b(2, 2)
    timeline = simulate(add_transfers(schedule) if lowered else schedule, Costs(transfer=0.5))
    assert starts(timeline) == [[0, 1, 5, 8], [1.5, 2.5, 4.5, 5.5]]


def test_a_receive_that_is_posted_late_delays_the_transfer():
    program = add_transfers(one_f_one_b(2, 2))
    first, second, f0, b0, *rest = program.stages[1]
    late = Program(program.schedule, (program.stages[0], (first, f0, b0, second, *rest)))
    costs = Costs(transfer=1)
    assert starts(simulate(program, costs))[1] == [2, 3, 5, 6]
    assert starts(simulate(late, costs))[1] == [2, 3, 6, 7]


@over_table(("kind", "chunks"), FAMILIES)
def test_messages_cost_no_time_of_their_own(kind, chunks):
    for schedule in schedules(kind, chunks, stages=5, microbatches=6):
        assert simulate(add_transfers(schedule)).spans == simulate(schedule).spans


def test_gathers_delay_and_reductions_follow():
    program = lower(one_f_one_b(1, 2), gather=True, reduce_every_microbatch=True)
    timeline = simulate(program, Costs(gather=5, reduce=4))
    assert starts(timeline) == [[5, 6, 8, 9]]
    assert [(str(a), start, end) for a, start, end in timeline.collectives[0]] == [
        ("G0.0", 0, 5),
        ("S0.0", 6, 10),
        ("S0.1", 10, 14),
    ]
    assert timeline.makespan == 14


def test_a_reduction_does_not_end_before_its_backward():
    program = lower(zb_h1(1, 1), gather=False, reduce_every_microbatch=True)
    (reduction,) = simulate(program, Costs(weight=5, reduce=2)).collectives[0]
    assert reduction == (action("S0.0"), 2, 7)


def test_a_reduction_after_its_backward_begins_there():
    program = lower(one_f_one_b(1, 2), gather=False, reduce_every_microbatch=True, overlap_reduce=False)
    timeline = simulate(program, Costs(reduce=4))
    assert starts(timeline) == [[0, 1, 3, 4]]
    assert timeline.collectives[0] == ((action("S0.0"), 3, 7), (action("S0.1"), 7, 11))


def test_weight_gradients_do_not_wait_for_gathers():
    program = add_gathers(add_transfers(zb_v(1, 1)))
    timeline = simulate(program, Costs(forward=2, input=2, weight=2, gather=10))
    assert [(str(span.action), span.start) for span in timeline.spans[0]] == [
        ("F0.0", 10),
        ("F1.0", 21),
        ("I1.0", 22),
        ("W1.0", 23),
        ("I0.0", 33),
        ("W0.0", 34),
    ]


def test_a_circle_of_waits_is_told():
    right = one_f_one_b(2, 1)
    turned = (tuple(reversed(right.actions[0])), right.actions[1])
    with pytest.raises(ScheduleError) as caught:
        simulate(Schedule("turned", 2, 1, right.stage_of, turned))
    assert str(caught.value) == (
        "The schedule cannot finish: stage 0 waits at B0.0 for F0.0 of stage 0; "
        "stage 1 waits at F1.0 for F0.0 of stage 0"
    )
    assert isinstance(caught.value, MegazeroError)


def test_a_missing_receive_is_told():
    program = add_transfers(one_f_one_b(2, 1))
    without = tuple(each for each in program.stages[1] if each != program.stages[1][0])
    with pytest.raises(ScheduleError, match="Stage 1 must receive the result of F0.0 before F1.0"):
        simulate(Program(program.schedule, (program.stages[0], without)))


def test_a_missing_send_is_told():
    program = add_transfers(one_f_one_b(2, 1))
    without = tuple(each for each in program.stages[0] if not getattr(each, "sends", ()))
    with pytest.raises(ScheduleError, match="stage 1 waits at F1.0 for F0.0 of stage 0"):
        simulate(Program(program.schedule, (without, program.stages[1])))


def test_an_activation_lives_until_its_weight_gradient():
    order = tuple(map(action, ("F0.0", "I0.0", "F0.1", "W0.0", "I0.1", "W0.1")))
    schedule = Schedule("by hand", 1, 2, (0,), (order,))
    assert simulate(schedule).peak_activations == (2,)
    joined = tuple(map(action, ("F0.0", "B0.0", "F0.1", "B0.1")))
    assert simulate(Schedule("by hand", 1, 2, (0,), (joined,))).peak_activations == (1,)
