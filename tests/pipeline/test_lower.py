"""Programs: literal lists, and laws over all schedules. test_check.py tries `check` itself on damage."""

from __future__ import annotations

from itertools import product

from megazero.pipeline.actions import Action, Exchange, Op
from megazero.pipeline.lower import add_gathers, add_reductions, add_transfers, lower
from megazero.pipeline.schedules import forward_only, gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from megazero.pipeline.simulate import Costs, simulate
from tests.pipeline.check import check
from tests.pipeline.samples import FAMILIES, lines, schedules
from tests.tables import over_table


def test_transfers_of_1f1b():
    assert lines(add_transfers(one_f_one_b(2, 3))) == [
        [
            "F0.0",
            "send hidden 0.0 from stage 0 to 1",
            "F0.1",
            "send hidden 0.1 from stage 0 to 1",
            "receive grad 1.0 from stage 1 to 0",
            "B0.0",
            "F0.2",
            "send hidden 0.2 from stage 0 to 1; receive grad 1.1 from stage 1 to 0",
            "receive grad 1.2 from stage 1 to 0",
            "B0.1",
            "B0.2",
        ],
        [
            "receive hidden 0.0 from stage 0 to 1",
            "receive hidden 0.1 from stage 0 to 1",
            "F1.0",
            "B1.0",
            "send grad 1.0 from stage 1 to 0",
            "F1.1",
            "B1.1",
            "send grad 1.1 from stage 1 to 0; receive hidden 0.2 from stage 0 to 1",
            "F1.2",
            "B1.2",
            "send grad 1.2 from stage 1 to 0",
        ],
    ]


def test_the_turn_of_the_v_needs_no_message():
    program = add_transfers(zb_v(2, 1))
    assert lines(program) == [
        [
            "F0.0",
            "send hidden 0.0 from stage 0 to 1",
            "receive hidden 2.0 from stage 1 to 0",
            "F3.0",
            "I3.0",
            "send grad 3.0 from stage 0 to 1",
            "W3.0",
            "receive grad 1.0 from stage 1 to 0",
            "I0.0",
            "W0.0",
        ],
        [
            "receive hidden 0.0 from stage 0 to 1",
            "F1.0",
            "F2.0",
            "send hidden 2.0 from stage 1 to 0",
            "receive grad 3.0 from stage 0 to 1",
            "I2.0",
            "W2.0",
            "I1.0",
            "send grad 1.0 from stage 1 to 0",
            "W1.0",
        ],
    ]


def test_one_stage_sends_nothing():
    for schedule in (gpipe(1, 3), zb_h1(1, 3), zb_v(1, 3), interleaved(1, 3, 3)):
        program = add_transfers(schedule)
        assert program.stages == schedule.actions


@over_table(("kind", "chunks"), FAMILIES)
def test_every_program_is_sound(kind, chunks):
    for schedule in schedules(kind, chunks, microbatches=9):
        check(lower(schedule, gather=schedule.microbatches % 2 == 0, reduce_every_microbatch=False))


@over_table(("kind", "chunks"), FAMILIES)
def test_tags_are_unique_and_exchanges_have_one_partner(kind, chunks):
    for schedule in schedules(kind, chunks, stages=4, microbatches=6):
        program = add_transfers(schedule)
        tags = []
        for stage, instructions in enumerate(program.stages):
            for exchange in (each for each in instructions if isinstance(each, Exchange)):
                assert len({m.source + m.target - stage for m in exchange.messages}) == 1
                tags += [message.tag for message in exchange.sends]
        assert len(tags) == len(set(tags))


@over_table("schedule", [gpipe(4, 16), zb_h1(4, 16), zb_v(4, 16), forward_only(4, 16)])
def test_transfers_hide_behind_compute_where_there_is_any(schedule):
    """Receives that were posted only when their producer ended cost a transfer for every micro-batch."""
    costs = Costs(forward=2, input=2, weight=2, backward=4, transfer=0.25)
    assert simulate(add_transfers(schedule), costs).makespan == simulate(schedule, costs).makespan


def test_reductions_of_every_microbatch_come_with_its_backward():
    program = add_reductions(add_transfers(one_f_one_b(2, 2)), every_microbatch=True)
    assert lines(program)[1] == [
        "receive hidden 0.0 from stage 0 to 1",
        "receive hidden 0.1 from stage 0 to 1",
        "F1.0",
        "S1.0",
        "B1.0",
        "send grad 1.0 from stage 1 to 0",
        "F1.1",
        "S1.1",
        "B1.1",
        "send grad 1.1 from stage 1 to 0",
    ]


def test_reductions_without_overlap_follow_the_sends():
    program = add_reductions(add_transfers(one_f_one_b(2, 2)), every_microbatch=True, overlap=False)
    assert lines(program)[1] == [
        "receive hidden 0.0 from stage 0 to 1",
        "receive hidden 0.1 from stage 0 to 1",
        "F1.0",
        "B1.0",
        "send grad 1.0 from stage 1 to 0",
        "S1.0",
        "F1.1",
        "B1.1",
        "send grad 1.1 from stage 1 to 0",
        "S1.1",
    ]


def test_reductions_once_come_with_the_last_weight_gradients_of_each_chunk():
    plain = add_transfers(zb_v(1, 2))
    start = ["F0.0", "F1.0", "I1.0", "W1.0", "F0.1", "I0.0", "W0.0", "F1.1", "I1.1"]
    during = add_reductions(plain, every_microbatch=False)
    assert lines(during)[0] == [*start, "S1.1", "W1.1", "I0.1", "S0.1", "W0.1"]
    after = add_reductions(plain, every_microbatch=False, overlap=False)
    assert lines(after)[0] == [*start, "W1.1", "S1.1", "I0.1", "W0.1", "S0.1"]


@over_table(("kind", "chunks"), FAMILIES)
def test_number_of_reductions(kind, chunks):
    for schedule in schedules(kind, chunks, stages=4, microbatches=6):
        for every, overlap in product((True, False), repeat=2):
            program = add_reductions(add_transfers(schedule), every_microbatch=every, overlap=overlap)
            check(program)
            done = [
                (each.chunk, each.microbatch)
                for stage in program.stages
                for each in stage
                if isinstance(each, Action) and each.op is Op.REDUCE
            ]
            if not schedule.training:
                assert done == []
            elif every:
                assert len(done) == len(set(done)) == schedule.chunks * schedule.microbatches
            else:
                assert sorted(chunk for chunk, _ in done) == list(range(schedule.chunks))


def test_a_chunk_is_kept_while_it_is_used_again_next():
    assert lines(add_gathers(add_transfers(one_f_one_b(1, 2)))) == [
        ["G0.0", "F0.0", "B0.0", "F0.1", "B0.1", "R0.1"]
    ]
    assert lines(add_gathers(add_transfers(interleaved(1, 1, 2)))) == [
        ["G0.0", "F0.0", "R0.0", "G1.0", "F1.0", "B1.0", "R1.0", "G0.0", "B0.0", "R0.0"]
    ]


def test_weight_gradients_need_no_gathered_chunk_and_hide_the_next_gather():
    assert lines(add_gathers(add_transfers(zb_v(1, 1)))) == [
        ["G0.0", "F0.0", "R0.0", "G1.0", "F1.0", "I1.0", "R1.0", "G0.0", "W1.0", "I0.0", "R0.0", "W0.0"]
    ]


def test_reductions_hide_the_next_gather_with_their_weight_gradients():
    program = add_gathers(add_reductions(add_transfers(zb_v(1, 1)), every_microbatch=True))
    assert lines(program)[0] == [
        *("G0.0", "F0.0", "R0.0", "G1.0", "F1.0", "I1.0", "R1.0"),
        *("G0.0", "S1.0", "W1.0", "I0.0", "R0.0", "S0.0", "W0.0"),
    ]


def test_lower_is_the_passes():
    schedule = zb_v(3, 4)
    plain = add_transfers(schedule)
    assert lower(schedule, gather=False, reduce_every_microbatch=True) == add_reductions(
        plain, every_microbatch=True
    )
    assert lower(schedule, gather=True, reduce_every_microbatch=False) == add_gathers(
        add_reductions(plain, every_microbatch=False)
    )
    assert lower(schedule, gather=True, reduce_every_microbatch=False, overlap_reduce=False) == add_gathers(
        add_reductions(plain, every_microbatch=False, overlap=False)
    )
