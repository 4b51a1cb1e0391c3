"""`check` on damaged programs: each kind of damage is refused, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megazero.pipeline.actions import Exchange, Instruction, Program, ScheduleError
from megazero.pipeline.lower import add_transfers, lower
from megazero.pipeline.schedules import build_schedule, gpipe, one_f_one_b
from tests.pipeline.check import check
from tests.pipeline.samples import FAMILIES, action
from tests.tables import over_table

List = tuple[Instruction, ...]


def changed(program: Program, stage: int, change: Callable[[List], List]) -> Program:
    lists = list(program.stages)
    lists[stage] = tuple(change(lists[stage]))
    return Program(program.schedule, tuple(lists))


def index(instructions: List, text: str) -> int:
    return [str(each) for each in instructions].index(text)


def without(*texts: str) -> Callable[[List], List]:
    return lambda list_: tuple(each for each in list_ if str(each) not in texts)


def swapped(first: str, second: str) -> Callable[[List], List]:
    def change(list_: List) -> List:
        i, j = index(list_, first), index(list_, second)
        out = list(list_)
        out[i], out[j] = out[j], out[i]
        return tuple(out)

    return change


def moved_last(text: str) -> Callable[[List], List]:
    return lambda list_: (*without(text)(list_), list_[index(list_, text)])


def doubled(text: str) -> Callable[[List], List]:
    def change(list_: List) -> List:
        i = index(list_, text)
        return (*list_[: i + 1], *list_[i:])

    return change


GPIPE = add_transfers(gpipe(2, 2))
REDUCED = lower(gpipe(2, 2), gather=False, reduce_every_microbatch=False)
FULL = lower(one_f_one_b(2, 2), gather=True, reduce_every_microbatch=False)

DAMAGE = [
    ("missing action", GPIPE, 1, without("B1.1"), "Stage 1: B1.1 is missing"),
    ("doubled action", GPIPE, 0, doubled("F0.1"), "Stage 0: F0.1 is done twice"),
    (
        "foreign action",
        GPIPE,
        0,
        lambda list_: (*list_, action("F1.0")),
        "Stage 0: F1.0 is not of this stage",
    ),
    ("split action", GPIPE, 0, lambda list_: (*list_, action("W0.0")), "Stage 0: W0.0 is not of this stage"),
    ("action too early", GPIPE, 1, swapped("F1.1", "B1.1"), "Stage 1: B1.1 comes before F1.1"),
    (
        "receive too late",
        GPIPE,
        1,
        moved_last("receive hidden 0.0 from stage 0 to 1"),
        "Stage 1: F1.0 comes before the receive of F0.0's result",
    ),
    (
        "dropped receive",
        GPIPE,
        0,
        without("receive grad 1.0 from stage 1 to 0"),
        "Stage 0: B0.0 comes before the receive of B1.0's result",
    ),
    (
        "send too early",
        GPIPE,
        0,
        swapped("send hidden 0.0 from stage 0 to 1", "F0.0"),
        "Stage 0: `hidden 0.0 from stage 0 to 1` is sent before F0.0",
    ),
    (
        "dropped send",
        GPIPE,
        0,
        without("send hidden 0.1 from stage 0 to 1"),
        "`hidden 0.1 from stage 0 to 1` is received, but not sent",
    ),
    (
        "doubled send",
        GPIPE,
        0,
        doubled("send hidden 0.1 from stage 0 to 1"),
        "`hidden 0.1 from stage 0 to 1` is sent, but not received",
    ),
    (
        "swapped exchanges",
        GPIPE,
        1,
        swapped("receive hidden 0.0 from stage 0 to 1", "receive hidden 0.1 from stage 0 to 1"),
        "Stage 0 sends `hidden 0.0 from stage 0 to 1` when stage 1 receives `hidden 0.1 from stage 0 to 1`",
    ),
    ("never gathered", FULL, 0, without("G0.0"), "Stage 0: F0.0 comes while chunk 0 is not gathered"),
    ("gathered twice", FULL, 0, doubled("G0.0"), "Stage 0: G0.0 gathers what is gathered"),
    ("never released", FULL, 0, without("R0.1"), "Stage 0: chunk 0 is never released"),
    ("never reduced", REDUCED, 0, without("S0.1"), "Stage 0: no reduction takes the gradients of B0.1"),
    (
        "reduced too early",
        REDUCED,
        0,
        lambda list_: tuple(action("S0.0") if str(each) == "S0.1" else each for each in list_),
        "Stage 0: no reduction takes the gradients of B0.1",
    ),
    ("reduced twice", REDUCED, 0, doubled("S0.1"), "Stage 0: S0.1 comes twice before its backward"),
    (
        "reduced again",
        REDUCED,
        0,
        lambda list_: (*list_, action("S0.1")),
        "Stage 0: S0.1 finds nothing to reduce",
    ),
    (
        "reduced elsewhere",
        REDUCED,
        0,
        lambda list_: (action("S1.0"), *list_),
        "Stage 0: S1.0 reduces no backward of this stage",
    ),
]


@over_table(
    ("program", "stage", "change", "message"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE]
)
def test_damage_is_told(program, stage, change, message):
    check(program)
    damaged = changed(program, stage, change)
    assert damaged != program
    with pytest.raises(ScheduleError) as caught:
        check(damaged)
    assert str(caught.value) == message


def test_a_message_the_schedule_does_not_ask_for_is_told():
    def retagged(exchange: Instruction) -> Instruction:
        if not isinstance(exchange, Exchange):
            return exchange
        new = [tuple(replace(m, tag=m.tag + 7) for m in part) for part in (exchange.sends, exchange.receives)]
        return Exchange(*new)

    lists = tuple(tuple(map(retagged, list_)) for list_ in GPIPE.stages)
    with pytest.raises(ScheduleError, match="Stage 0: `hidden 0.0 .*` is not one of its messages"):
        check(Program(GPIPE.schedule, lists))


def test_a_deadlock_of_blocking_exchanges_is_told():
    """Every action has its inputs and each direction its order, yet both stages wait for the other."""
    first, second = "send hidden 0.1 from stage 0 to 1", "receive grad 1.0 from stage 1 to 0"
    with pytest.raises(ScheduleError) as caught:
        check(changed(GPIPE, 0, swapped(first, second)))
    assert str(caught.value) == (
        "The exchanges deadlock: stage 0 waits at `receive grad 1.0 from stage 1 to 0` for stage 1; "
        "stage 1 waits at `receive hidden 0.1 from stage 0 to 1` for stage 0"
    )


@pytest.mark.parametrize(
    "change", [moved_last("S0.1"), lambda list_: (action("S0.1"), *without("S0.1")(list_))]
)
def test_a_reduction_may_come_anywhere_that_takes_all_gradients(change):
    check(changed(REDUCED, 0, change))


@over_table(("kind", "chunks"), FAMILIES)
def test_no_instruction_can_be_left_out(kind, chunks):
    program = lower(build_schedule(kind, 3, 3, chunks), gather=True, reduce_every_microbatch=False)
    for stage, list_ in enumerate(program.stages):
        for i in range(len(list_)):
            with pytest.raises(ScheduleError):
                check(changed(program, stage, lambda list_, i=i: list_[:i] + list_[i + 1 :]))


@over_table(("kind", "chunks"), FAMILIES)
def test_no_stage_can_run_backwards(kind, chunks):
    program = add_transfers(build_schedule(kind, 3, 3, chunks))
    for stage in range(3):
        with pytest.raises(ScheduleError):
            check(changed(program, stage, lambda list_: list_[::-1]))
