"""What each step consumes: small cases drawn by hand, and laws against walking step by step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from megazero.config.stairs import BatchStairs
from megazero.config.steps import BatchRamp, BatchSizes, Progress, SequenceLengths, Step, Steps
from tests.config.samples import make_config
from tests.tables import over_table

# 4 -> 12 in steps of 4 over 30 samples: each size is held for 15 samples
RAMP = BatchRamp(start=4, increment=4, ramp_samples=30, final=12)
# steps 0, 1 and 2 of 10 tokens, 3 and 4 of 20, then 50
GROWING = SequenceLengths(((0, 10), (3, 20), (5, 50)))


def walk(steps: Steps, count: int) -> list[Step]:
    """The first steps, each after the one before it."""
    taken, progress = [], steps.start
    for _ in range(count):
        taken.append(steps.at(progress))
        progress = taken[-1].after
    return taken


def test_ramp_by_hand() -> None:
    assert [step.batch_size for step in walk(Steps(RAMP, 2, GROWING), 9)] == [4, 4, 4, 4, 8, 8, 12, 12, 12]
    assert [RAMP.at(n) for n in (0, 14, 15, 29, 30)] == [4, 4, 8, 8, 12]
    assert [RAMP.steps_held(n) for n in (0, 4, 12, 16, 24, 32)] == [4, 3, 1, 2, 1, None]


def test_a_ramp_that_does_not_grow_is_held_for_good() -> None:
    assert BatchRamp.constant(6).steps_held(0) is None
    # start above the end, which a rule refuses: the rules themselves must come to an end
    assert BatchRamp(12, 4, 30, 4).steps_held(0) is None


def test_ramp_of_a_configuration() -> None:
    def ramp(replicas: int, **changes: Any) -> BatchSizes:
        config = make_config({f"batch.{name}": value for name, value in changes.items()})
        return BatchRamp.of(config.batch, config.model, replicas)

    assert ramp(2, global_batch_size=16, rampup_batch_size=(4, 4, 30)) == BatchRamp(4, 4, 30, 16)
    assert ramp(3) == BatchRamp.constant(6)
    assert ramp(3, global_batch_size=24) == BatchRamp.constant(24)


def test_sequence_lengths_by_hand() -> None:
    places = [Progress(iteration=n) for n in range(7)]
    assert [GROWING.at(place) for place in places] == [10, 10, 10, 20, 20, 50, 50]
    assert [GROWING.steps_held(place, 99) for place in places] == [3, 2, 1, 2, 1, None, None]


def test_steps_by_hand() -> None:
    steps = Steps(RAMP, 2, GROWING)
    assert walk(steps, 7) == [
        Step(Progress(0, 0, 0), 4, 2, 10),
        Step(Progress(1, 4, 40), 4, 2, 10),
        Step(Progress(2, 8, 80), 4, 2, 10),
        Step(Progress(3, 12, 120), 4, 2, 20),
        Step(Progress(4, 16, 200), 8, 4, 20),
        Step(Progress(5, 24, 360), 8, 4, 50),
        Step(Progress(6, 32, 760), 12, 6, 50),
    ]
    assert [steps.before(n) for n in (0, 3, 5, 8)] == [
        Progress(0, 0, 0),
        Progress(3, 12, 120),
        Progress(5, 24, 360),
        Progress(8, 56, 1960),
    ]
    assert [steps.within(n) for n in (0, 3, 4, 15, 23, 24, 43, 44)] == [0, 0, 1, 3, 4, 5, 6, 7]
    assert [steps.reaching(n) for n in (0, 1, 40, 41, 120, 121, 200, 201, 360, 361, 1361)] == [
        *(0, 1, 1, 2, 3, 4, 4, 5, 5, 6, 8),
    ]


def test_steps_that_start_between_those_of_the_beginning() -> None:
    """After 5 steps of 4 samples, the ramp's sizes go on from 20 samples and the lengths from step 5."""
    steps = Steps(RAMP, 4, GROWING, Progress(5, 20, 260))
    assert walk(steps, 3) == [
        Step(Progress(5, 20, 260), 8, 2, 50),
        Step(Progress(6, 28, 660), 8, 2, 50),
        Step(Progress(7, 36, 1060), 12, 3, 50),
    ]
    assert steps.before(5) == steps.start
    assert (steps.within(19), steps.within(20), steps.within(36), steps.within(48)) == (5, 5, 7, 8)
    assert (steps.reaching(3), steps.reaching(260), steps.reaching(661)) == (5, 5, 7)
    with pytest.raises(ValueError, match="at least 5, but is 4"):
        steps.before(4)


def test_progress_counts_in_each_unit() -> None:
    assert [Progress(1, 2, 3).count(unit) for unit in ("iters", "samples", "tokens")] == [1, 2, 3]


def made_up(seed: int) -> Steps:
    """Some ramp (or none) with a sequence length that changes a few times."""
    draw = Random(seed).randint
    start, increment, count = draw(1, 9), draw(1, 9), draw(0, 6)
    ramp = BatchRamp(start, increment, draw(1, 200), start + count * increment)
    at = sorted({0, *(draw(1, 30) for _ in range(draw(0, 5)))})
    return Steps(ramp, draw(1, 3), SequenceLengths(tuple((first, draw(1, 40)) for first in at)))


SEEDS = range(100)


def test_counts_agree_with_walking() -> None:
    for steps in map(made_up, SEEDS):
        taken = walk(steps, 40)
        for a, b in pairwise(taken):
            assert b.before == Progress(
                a.before.iteration + 1,
                a.before.samples + a.batch_size,
                a.before.tokens + a.batch_size * a.sequence_length,
            )
        for number, step in enumerate(taken):
            assert steps.before(number) == step.before
            assert steps.within(step.before.samples) == steps.reaching(step.before.tokens) == number
            assert steps.within(step.after.samples - 1) == number
            assert steps.reaching(step.before.tokens + 1) == steps.reaching(step.after.tokens) == number + 1


def test_a_later_start_of_the_same_steps_gives_the_same_rest() -> None:
    for steps in map(made_up, SEEDS):
        taken = walk(steps, 40)
        for done in (1, 7, 19):
            later = replace(steps, start=steps.before(done))
            assert walk(later, 40 - done) == taken[done:]
            end = taken[-1].before
            assert later.before(39) == end
            assert later.within(end.samples) == later.reaching(end.tokens) == 39


def test_any_start_agrees_with_walking() -> None:
    for seed in SEEDS:
        draw = Random(1000 + seed).randint
        later = replace(made_up(seed), start=Progress(draw(0, 40), draw(0, 400), draw(0, 9000)))
        for number, step in enumerate(walk(later, 20)):
            assert later.before(later.start.iteration + number) == step.before


def stairs(schedule: str, seq_length: int = 32) -> BatchStairs:
    """The batch sizes of `--step-batch-size-schedule`."""
    config = make_config({"batch.step_batch_size_schedule": (schedule,), "model.seq_length": seq_length})
    sizes = BatchRamp.of(config.batch, config.model, 1)
    assert isinstance(sizes, BatchStairs)
    return sizes


def test_a_schedule_of_batches_counts_tokens_with_suffixes() -> None:
    """Megatron-LM's own example, at 4096 tokens a sample; a threshold is rounded down to whole samples."""
    sizes = stairs("0:768 250B:1536 500B:3072, 750b:6144", 4096)
    assert sizes.pieces == ((0, 768), (61_035_156, 1536), (122_070_312, 3072), (183_105_468, 6144))
    assert (sizes.start, sizes.final, sizes.increments) == (768, 6144, 3)
    assert [sizes.at(count) for count in (0, 61_035_155, 61_035_156, 10**12)] == [768, 768, 1536, 6144]


def test_a_step_keeps_the_size_with_which_it_begins() -> None:
    sizes = stairs("0:4 320:6 1.28K:2")  # from samples 10 and 40 on
    assert [sizes.at(count) for count in (0, 9, 10, 39, 40)] == [4, 4, 6, 6, 2]
    assert [sizes.steps_held(count) for count in (0, 8, 12, 39, 40)] == [3, 1, 5, 1, None]


@over_table("text", ["768", "0:8 x:16", "0:0", "-1:8", "0:8:9", "0:", "0:8.9", "0.5:8", "1.0005K:8"])
def test_a_schedule_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="must be THRESHOLD:SIZE pairs such as 0:768 250B:1536"):
        stairs(text)
