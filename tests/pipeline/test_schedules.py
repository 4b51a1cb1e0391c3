"""Schedules against hand-drawn grids, and laws that hold for every kind and size."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from megazero.commands.plan.timeline import render_text
from megazero.config.derive import fills_groups
from megazero.errors import ConfigError
from megazero.pipeline.actions import Op
from megazero.pipeline.lower import lower
from megazero.pipeline.schedules import (
    KINDS,
    build_schedule,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from megazero.pipeline.simulate import Costs, simulate
from tests.pipeline.check import check
from tests.pipeline.samples import FAMILIES, action, activation_bound, gaps, schedules
from tests.tables import over_table

GRIDS = [
    (
        gpipe(2, 3),
        """
stage 0 | F0 F1 F2 .  .  .  B0 -  B1 -  B2 -
stage 1 | .  F0 F1 F2 B0 -  B1 -  B2 -  .  .
        """,
    ),
    (
        one_f_one_b(4, 4),
        """
stage 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 -  .  B1 -  .  B2 -  .  B3 -
stage 1 | .  F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  .  B2 -  .  B3 -  .  .
stage 2 | .  .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -  .  .  .  .
stage 3 | .  .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .  .  .  .  .
        """,
    ),
    (
        one_f_one_b(3, 1),
        """
stage 0 | F0 .  .  .  .  .  .  B0 -
stage 1 | .  F0 .  .  .  B0 -  .  .
stage 2 | .  .  F0 B0 -  .  .  .  .
        """,
    ),
    (
        interleaved(2, 2, 2),
        """
stage 0 | F0.0 F0.1 F2.0 F2.1 .    .    B2.0 -    .    B2.1 -    B0.0 -    B0.1 -
stage 1 | .    F1.0 F1.1 F3.0 B3.0 -    F3.1 B3.1 -    B1.0 -    B1.1 -    .    .
        """,
    ),
    (
        zb_h1(3, 4),
        """
stage 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
stage 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
stage 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """,
    ),
    (
        zb_v(2, 3),
        """
stage 0 | F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2 .
stage 1 | .    F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2
        """,
    ),
    (
        zb_v(1, 2),
        """
stage 0 | F0.0 F1.0 I1.0 W1.0 F0.1 I0.0 W0.0 F1.1 I1.1 W1.1 I0.1 W0.1
        """,
    ),
    (
        forward_only(2, 3, 2),
        """
stage 0 | F0.0 F0.1 F2.0 F2.1 F0.2 .    F2.2 .
stage 1 | .    F1.0 F1.1 F3.0 F3.1 F1.2 .    F3.2
        """,
    ),
    (
        forward_only(2, 3, 2, v_shape=True),
        """
stage 0 | F0.0 F0.1 F0.2 F3.0 .    F3.1 .    F3.2
stage 1 | .    F1.0 F2.0 F1.1 F2.1 F1.2 F2.2 .
        """,
    ),
]


@over_table(("schedule", "grid"), GRIDS, ids=[f"{s.kind}-{s.stages}x{s.microbatches}" for s, _ in GRIDS])
def test_a_schedule_is_the_drawn_grid(schedule, grid):
    drawn = [" ".join(line.split()) for line in render_text(simulate(schedule)).splitlines()]
    assert drawn == [" ".join(line.split()) for line in grid.strip().splitlines()]


@over_table(("kind", "chunks"), FAMILIES)
def test_every_action_exactly_once_and_memory_within_the_published_bound(kind, chunks):
    for schedule in schedules(kind, chunks):
        case = (schedule.stages, schedule.microbatches)
        ops = {"forward": "F", "zb-h1": "FIW", "zb-v": "FIW"}.get(kind, "FB")
        everything = Counter(each for stage in schedule.actions for each in stage)
        assert set(everything.values()) == {1}, case
        assert {(each.op.value, each.chunk, each.microbatch) for each in everything} == {
            (op, chunk, m)
            for op in ops
            for chunk in range(schedule.stages * chunks)
            for m in range(schedule.microbatches)
        }, case
        for stage, actions in enumerate(schedule.actions):
            assert {each.chunk for each in actions} == set(schedule.chunks_of(stage)), case
        bound = activation_bound(kind, *case, chunks)
        peak = simulate(schedule).peak_activations
        assert all(a <= b for a, b in zip(peak, bound, strict=True)), (case, peak, bound)


@over_table(("kind", "chunks"), FAMILIES)
def test_gradients_of_a_chunk_are_summed_in_ascending_order(kind, chunks):
    for schedule in schedules(kind, chunks):
        for stage, actions in enumerate(schedule.actions):
            for chunk in schedule.chunks_of(stage):
                for op in Op:
                    order = [each.microbatch for each in actions if (each.op, each.chunk) == (op, chunk)]
                    assert order == sorted(order)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_bubble_of_gpipe_and_1f1b(make):
    for p in range(1, 7):
        for m in range(1, 13):
            assert simulate(make(p, m), Costs(forward=3, backward=2)).makespan == (m + p - 1) * 5


@over_table("v", [1, 2, 3])
def test_chunks_divide_the_bubble_of_1f1b(v):
    for p in range(1, 7):
        for rounds in (1, 2, 3):
            m = p * rounds
            bubble = simulate(interleaved(p, m, v)).makespan - 3 * m
            assert bubble == pytest.approx((p - 1) * 3 / v)


@over_table(("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (1, 2, 1), (2, 3, 2)])
def test_bubble_of_zb_h1(f, i, w):
    for p in range(1, 7):
        for m in range(p, 13):
            timeline = simulate(zb_h1(p, m), Costs(forward=f, input=i, weight=w))
            assert timeline.makespan - m * (f + i + w) == (p - 1) * (f + i - w)


def test_zb_v_never_idles_once_started():
    """Stage s starts as soon as the first micro-batch can be there, and then computes without a gap."""
    for p in range(1, 7):
        for m in range(2 * p - 1, 16):
            timeline = simulate(zb_v(p, m), Costs(forward=2, input=2, weight=2))
            assert gaps(timeline) == (0,) * p
            assert [spans[0].start for spans in timeline.spans] == list(range(p))
            assert timeline.peak_activations == (2 * p,) * p


def test_memory_reaches_the_bounds():
    assert activation_bound("gpipe", 3, 7) == (7, 7, 7) == simulate(gpipe(3, 7)).peak_activations
    assert activation_bound("1f1b", 3, 7) == (3, 2, 1) == simulate(one_f_one_b(3, 7)).peak_activations
    assert activation_bound("1f1b", 3, 2) == (2, 2, 1)
    assert activation_bound("zb-h1", 3, 7) == (3, 3, 3) == simulate(zb_h1(3, 7)).peak_activations
    assert activation_bound("zb-v", 3, 7, 2) == (6, 6, 6) == simulate(zb_v(3, 7)).peak_activations
    interleaved_peak = simulate(interleaved(4, 8, 2)).peak_activations
    assert activation_bound("interleaved", 4, 8, 2) == (11, 9, 7, 5) == interleaved_peak
    assert activation_bound("forward", 2, 7, 3) == (1, 1) == simulate(forward_only(2, 7, 3)).peak_activations


def test_placement():
    assert interleaved(3, 3, 2).stage_of == (0, 1, 2, 0, 1, 2)
    assert zb_v(3, 1).stage_of == (0, 1, 2, 2, 1, 0) == forward_only(3, 1, 2, v_shape=True).stage_of
    assert zb_v(3, 1).chunks_of(1) == (1, 4)
    assert (zb_v(3, 1).chunks, zb_v(3, 1).chunks_per_stage) == (6, 2)


def test_what_an_action_needs():
    schedule = zb_v(2, 2)
    assert schedule.needs(action("F0.1")) == ()
    assert schedule.needs(action("F2.1")) == (action("F1.1"),)
    assert schedule.needs(action("I3.0")) == (action("F3.0"),)
    assert schedule.needs(action("I1.0")) == (action("F1.0"), action("I2.0"))
    assert schedule.needs(action("W1.0")) == (action("I1.0"),)
    assert one_f_one_b(2, 2).needs(action("B0.1")) == (action("F0.1"), action("B1.1"))


def test_messages_of_neighbours_on_one_stage_are_not_needed():
    schedule = zb_v(2, 2)
    assert schedule.message_from(action("F1.0")) is None
    assert schedule.message_from(action("I2.0")) is None
    assert schedule.message_from(action("W1.0")) is None
    assert schedule.message_from(action("F3.0")) is None
    message = schedule.message_from(action("F2.1"))
    assert (message.source, message.target, message.receiver) == (1, 0, 3)
    assert str(message) == "hidden 2.1 from stage 1 to 0"
    assert schedule.producer_of(schedule.message_from(action("I3.1"))) == action("I3.1")


def test_interleaved_takes_groups_of_as_many_microbatches_as_stages():
    assert [" ".join(map(str, stage)) for stage in interleaved(2, 4, 2).actions] == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


def test_interleaved_takes_groups_of_other_sizes():
    """Megatron-LM's `--microbatch-group-size-per-virtual-pipeline-stage`: five micro-batches as 3 and 2."""
    assert [" ".join(map(str, stage)) for stage in interleaved(2, 5, 2, 3).actions] == [
        "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 F0.3 B2.1 F0.4 B2.2 F2.3 B0.0 F2.4 B0.1 B0.2 B2.3 B2.4 B0.3 B0.4",
        "F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F1.3 B1.0 F1.4 B1.1 F3.3 B1.2 F3.4 B3.3 B3.4 B1.3 B1.4",
    ]
    assert interleaved(3, 6, 2, 3) == interleaved(3, 6, 2)


@pytest.mark.parametrize("chunks", [2, 3])
def test_larger_groups_run_within_their_bound(chunks):
    for stages, microbatches, group in product(range(1, 5), range(1, 10), range(1, 10)):
        if not fills_groups(stages, microbatches, group):
            continue
        schedule = interleaved(stages, microbatches, chunks, group)
        every = [each for actions in schedule.actions for each in actions]
        assert len(every) == len(set(every)) == 2 * microbatches * stages * chunks
        check(lower(schedule, gather=True, reduce_every_microbatch=microbatches % 2 == 0))
        peak = simulate(schedule).peak_activations
        bound = activation_bound("interleaved", stages, microbatches, chunks, group)
        assert all(a <= b for a, b in zip(peak, bound, strict=True)), (stages, microbatches, group)


def test_groups_that_a_stage_would_wait_in_do_not_fill():
    sizes = [(2, 5, 3), (2, 4, 3), (4, 5, 5), (4, 9, 5), (4, 8, 5), (4, 4, 5), (4, 8, 3)]
    assert [fills_groups(*each) for each in sizes] == [True, False, True, True, False, False, False]


def test_one_chunk_per_stage_interleaved_is_1f1b():
    assert interleaved(3, 6, 1).actions == one_f_one_b(3, 6).actions


@over_table("kind", KINDS)
def test_kinds_are_built_by_name(kind):
    schedule = build_schedule(kind, 2, 4)
    assert schedule.kind == kind
    assert schedule.chunks_per_stage == (2 if kind in ("interleaved", "zb-v") else 1)


@over_table(
    ("arguments", "message"),
    [
        (("1f1B", 2, 2), "one of gpipe, 1f1b, interleaved, zb-h1, zb-v, forward, but is `1f1B`"),
        (("1f1b", 0, 2), "pipeline stages must be at least 1, but is 0"),
        (("1f1b", 2, 0), "micro-batches of a step must be at least 1, but is 0"),
        (("forward", 2, 2, 0), "chunks per stage must be at least 1, but is 0"),
        (("1f1b", 2, 2, 2), "must be 1 for the schedule 1f1b, but is 2; choose interleaved"),
        (("zb-v", 2, 2, 3), "must be 2 for a placement in a V (zb-v), but is 3"),
        (("interleaved", 4, 7, 2), "multiple of the pipeline stages (4)"),
        (("interleaved", 4, 7, 2), "but are 7; make them 8, or choose 1f1b or zb-v"),
        (("interleaved", 4, 1, 2), "make them 4"),
    ],
)
def test_sizes_that_a_kind_cannot_have_are_refused_with_a_remedy(arguments, message):
    with pytest.raises(ConfigError) as caught:
        build_schedule(*arguments)
    assert message in str(caught.value)


def test_groups_that_do_not_come_out_are_refused_with_a_remedy():
    said = r"must fill groups of 5, none smaller than the pipeline stages \(4\) .* but are 7; make them 5"
    with pytest.raises(ConfigError, match=said):
        build_schedule("interleaved", 4, 7, 2, group=5)
    with pytest.raises(ConfigError, match="but are 8; make the groups 4, or choose"):
        build_schedule("interleaved", 4, 8, 2, group=2)  # no other number of micro-batches would do


def test_chunks_per_stage_where_none_are_given():
    counts = {kind: build_schedule(kind, 2, 4).chunks_per_stage for kind in KINDS}
    assert counts == {kind: 2 if kind in ("interleaved", "zb-v") else 1 for kind in KINDS}
    assert build_schedule("forward", 2, 3, v_shape=True) == forward_only(2, 3, 2, v_shape=True)
