"""How far a training goes: limits, schedule lengths and evaluations by hand, and what a resume keeps."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megazero.config.steps import BEGINNING, BatchRamp, Progress, SequenceLengths, Step, Steps
from megazero.config.training_plan import (
    Evaluations,
    Limits,
    LrLengths,
    TrainingPlan,
    WarmupLength,
    training_plan_of,
)
from megazero.errors import ConfigError
from tests.config.samples import make_config
from tests.tables import over_table

LIMITS = ("train_iters", "train_samples", "train_tokens")
RAMP = {"batch.global_batch_size": 12, "batch.rampup_batch_size": (4, 4, 30)}


@over_table(
    ("changes", "expected"),
    [
        ({"training.train_iters": 10}, Progress(10, 40, 1280)),
        ({"training.train_samples": 43}, Progress(10, 40, 1280)),
        ({"training.train_samples": 3}, Progress(0, 0, 0)),
        ({"training.train_tokens": 1281}, Progress(11, 44, 1408)),
        ({"training.train_tokens": 1280}, Progress(10, 40, 1280)),
        # whichever comes first
        ({"training.train_iters": 10, "training.train_tokens": 300}, Progress(3, 12, 384)),
        ({"training.train_iters": 2, "training.train_tokens": 300}, Progress(2, 8, 256)),
        ({"training.train_samples": 8, "training.train_tokens": 300}, Progress(2, 8, 256)),
        # 4 4 4 4 8 8 12 12 ... samples
        ({**RAMP, "training.train_iters": 7}, Progress(7, 44, 1408)),
        ({**RAMP, "training.train_samples": 43}, Progress(6, 32, 1024)),
        ({**RAMP, "training.train_tokens": 1025}, Progress(7, 44, 1408)),
    ],
)
def test_end(changes: dict[str, Any], expected: Progress) -> None:
    assert training_plan_of(make_config({"training.train_iters": None, **changes}), 2).end == expected


def test_without_a_limit() -> None:
    with pytest.raises(ConfigError, match="must be set"):
        training_plan_of(make_config({"training.train_iters": None}), 1)


def test_steps_of_a_configuration() -> None:
    training_plan = training_plan_of(make_config(RAMP), 2)
    assert training_plan.at(Progress()) == Step(Progress(), 4, 1, 32)
    assert training_plan.at(training_plan.before(6)) == Step(Progress(6, 32, 1024), 12, 3, 32)
    assert [training_plan.at(Progress(0, n, 0)).micro_batches for n in (0, 14, 15, 29, 30)] == [1, 1, 2, 2, 3]
    assert training_plan_of(make_config(), 2).at(Progress(0, 1000, 0)).micro_batches == 1


@over_table(
    ("changes", "expected"),
    [
        ({}, LrLengths("iters", 0, 100, None)),
        ({"optimizer.lr_warmup_iters": 7}, LrLengths("iters", 7, 100, None)),
        ({"optimizer.lr_warmup_fraction": 0.25}, LrLengths("iters", 25, 100, None)),
        ({"optimizer.lr_warmup_samples": 7}, LrLengths("samples", 7, 400, None)),
        ({"optimizer.lr_warmup_tokens": 7}, LrLengths("tokens", 7, 12800, None)),
        ({"optimizer.lr_decay_tokens": 99}, LrLengths("tokens", 0, 99, None)),
        # as in Megatron, the number that is given, of which the last step here leaves one sample over
        ({"training.train_iters": None, "training.train_samples": 41}, LrLengths("samples", 0, 41, None)),
        ({"training.train_tokens": 1280}, LrLengths("iters", 0, 100, None)),
        # 4 samples of 32 tokens a step: warmup in its own unit, decay in tokens
        (
            {"optimizer.lr_decay_tokens": 9999, "optimizer.lr_warmup_iters": 7},
            LrLengths("tokens", 7 * 128, 9999, None, WarmupLength(7, "iters")),
        ),
        (
            {"optimizer.lr_decay_tokens": 9999, "optimizer.lr_warmup_samples": 10},
            LrLengths("tokens", 320, 9999, None, WarmupLength(10, "samples")),
        ),
        # a fraction beside a decay in tokens is one of the training's iterations or samples
        (
            {"optimizer.lr_decay_tokens": 9999, "optimizer.lr_warmup_fraction": 0.25},
            LrLengths("tokens", 25 * 128, 9999, None, WarmupLength(25, "iters")),
        ),
        (
            {
                "optimizer.lr_decay_tokens": 9999,
                "optimizer.lr_warmup_fraction": 0.25,
                "training.train_iters": None,
                "training.train_samples": 50,
            },
            LrLengths("tokens", 400, 9999, None, WarmupLength(12.5, "samples")),
        ),
        (
            {
                "optimizer.lr_decay_tokens": 9999,
                "optimizer.lr_warmup_fraction": 0.25,
                "training.train_iters": None,
                "training.train_tokens": 5000,
            },
            LrLengths("tokens", 0.25 * 9999, 9999, None),
        ),
        ({**RAMP, "optimizer.lr_warmup_samples": 7}, LrLengths("samples", 7, 32 + 94 * 12, None)),
        (
            {"optimizer.lr_decay_style": "WSD", "optimizer.lr_wsd_decay_iters": 20},
            LrLengths("iters", 0, 100, 20),
        ),
    ],
)
def test_lr_lengths(changes: dict[str, Any], expected: LrLengths) -> None:
    assert training_plan_of(make_config(changes), 2).lr == expected


def test_evaluations_by_hand() -> None:
    every_10 = {"training.eval_interval": 10, "training.eval_iters": 3}
    found = training_plan_of(make_config({**RAMP, **every_10}), 2).evaluations
    assert found == Evaluations(10, 3, batch_size=12, micro_batches=3, same=False, sequence_length=32)
    assert found.samples == 36
    # one at 10 reads the first part, one at 20 the second; one at the end, at 25, the third
    assert [found.first_sample(n) for n in (0, 9, 10, 20, 25, 30)] == [0, 0, 0, 36, 72, 72]
    assert [found.samples_until(n) for n in (9, 10, 25, 30)] == [36, 72, 108, 144]
    same = training_plan_of(
        make_config({**RAMP, **every_10, "training.eval_from_start": True}), 2
    ).evaluations
    assert [same.first_sample(n) for n in (9, 10, 25)] == [0, 0, 0]
    assert [same.samples_until(n) for n in (9, 10, 25)] == [36, 36, 36]


def test_without_an_interval_there_is_one_evaluation_at_the_end() -> None:
    found = Evaluations(None, 3, 12, 3, same=False)
    assert (found.first_sample(25), found.samples_until(25)) == (0, 36)


def test_a_training_ends_before_its_tokens_cannot_be_counted() -> None:
    plan = training_plan_of(make_config({"training.train_iters": 2**63 - 1}), 2)
    assert 2**63 - 4 * 32 <= plan.end.tokens < 2**63
    assert plan.evaluations.samples_until(plan.end.iteration) * 32 < 2**63
    often = {"training.train_iters": 2**63 - 1, "training.eval_interval": 1}
    plan = training_plan_of(make_config(often), 2)
    assert plan.evaluations.samples_until(plan.end.iteration) == (2**63 - 1) // 32


@over_table("batches", [0, 1, 4])
def test_every_evaluation_has_samples_of_its_own(batches: int) -> None:
    for interval, iterations in product(range(1, 10), range(40)):
        evaluations = Evaluations(interval, batches, 5, 1, same=False)
        at = [*range(interval, iterations, interval), iterations]
        starts = [evaluations.first_sample(iteration) for iteration in at]
        assert starts == [i * evaluations.samples for i in range(len(at))]
        assert starts[-1] + evaluations.samples <= evaluations.samples_until(iterations)


def varying(limits: Limits, start: Progress = BEGINNING) -> TrainingPlan:
    """Made up: 6 samples a step, of 10 tokens for 3 steps, 20 for 2, and 50 from then on."""
    steps = Steps(BatchRamp.constant(6), 2, SequenceLengths(((0, 10), (3, 20), (5, 50))), start)
    return TrainingPlan(steps, limits, LrLengths("tokens", 0, 1, None), Evaluations(10, 1, 6, 3, same=False))


@over_table(
    ("limits", "expected"),
    [
        (Limits(iterations=7), Progress(7, 42, 3 * 60 + 2 * 120 + 2 * 300)),
        (Limits(samples=41), Progress(6, 36, 3 * 60 + 2 * 120 + 1 * 300)),
        (Limits(tokens=180), Progress(3, 18, 180)),
        (Limits(tokens=181), Progress(4, 24, 300)),
        (Limits(tokens=420), Progress(5, 30, 420)),
        (Limits(tokens=1_000_000), Progress(5 + 3332, 6 * 3337, 420 + 300 * 3332)),
        (Limits(iterations=7, samples=100, tokens=421), Progress(6, 36, 720)),
        (Limits(iterations=5, samples=100, tokens=421), Progress(5, 30, 420)),
        (Limits(iterations=7, samples=24, tokens=421), Progress(4, 24, 300)),
    ],
)
def test_tokens_of_a_varying_sequence_length_are_sums(limits: Limits, expected: Progress) -> None:
    training_plan = varying(limits)
    assert training_plan.end == expected
    progress, tokens = Progress(), 0
    while progress != training_plan.end:
        tokens += training_plan.at(progress).tokens
        progress = training_plan.at(progress).after
    assert tokens == expected.tokens


@over_table("iterations", [None, 1, 9])
def test_resuming_anywhere_gives_the_same_rest(iterations: int | None) -> None:
    for samples, tokens in product((None, 5, 31, 60), (1, 180, 181, 2000)):
        limits = Limits(iterations, samples, tokens)
        training_plan = varying(limits)
        for done in range(training_plan.end.iteration + 1):
            here = training_plan.before(done)
            resumed = varying(limits, here)
            assert resumed.end == training_plan.end
            assert resumed.at(here) == training_plan.at(here)
            assert resumed.before(training_plan.end.iteration) == training_plan.end


@over_table("unit", ["iters", "samples", "tokens"])
@over_table(
    "limits",
    [
        {"train_iters": 17},
        {"train_samples": 131},
        {"train_tokens": 4000},
        {"train_iters": 9, "train_tokens": 4000},
    ],
)
def test_resuming_anywhere_gives_the_same_horizon(limits: dict[str, int], unit: str) -> None:
    lengths = {f"training.{name}": limits.get(name) for name in LIMITS}
    for more in ({}, {"optimizer.lr_decay_tokens": 3000}):
        config = make_config({**RAMP, **lengths, f"optimizer.lr_warmup_{unit}": 3, **more})
        training_plan = training_plan_of(config, 2)
        for done in range(training_plan.end.iteration + 1):
            resumed = training_plan_of(config, 2, training_plan.before(done))
            assert (resumed.end, resumed.lr, resumed.evaluations) == (
                training_plan.end,
                training_plan.lr,
                training_plan.evaluations,
            )


@over_table(
    ("limit", "now", "here", "end"),
    [
        # Each after 4 steps of 8 samples or of 4, of 32 tokens, with another batch size for the rest
        ({"train_iters": 8}, 4, Progress(4, 32, 1024), Progress(8, 48, 1536)),
        ({"train_iters": 8}, 16, Progress(4, 32, 1024), Progress(8, 96, 3072)),
        ({"train_samples": 32}, 8, Progress(4, 16, 512), Progress(6, 32, 1024)),
        ({"train_samples": 32}, 12, Progress(4, 16, 512), Progress(5, 28, 896)),
        ({"train_tokens": 1024}, 8, Progress(4, 16, 512), Progress(6, 32, 1024)),
        ({"train_tokens": 1024}, 12, Progress(4, 16, 512), Progress(6, 40, 1280)),
        # a limit that is behind
        ({"train_iters": 3}, 8, Progress(4, 16, 512), Progress(4, 16, 512)),
        ({"train_samples": 8}, 8, Progress(4, 16, 512), Progress(4, 16, 512)),
        ({"train_tokens": 100}, 8, Progress(4, 16, 512), Progress(4, 16, 512)),
    ],
)
def test_limits_hold_for_both_parts_when_the_batch_size_changes(
    limit: dict[str, int], now: int, here: Progress, end: Progress
) -> None:
    """The end was once that of the whole training with the new batch size, whatever had been consumed."""
    lengths = {f"training.{name}": limit.get(name) for name in LIMITS}
    config = make_config({"batch.global_batch_size": now, **lengths})
    assert training_plan_of(config, 2, here).end == end


@over_table(
    ("unit", "length", "into", "expected"),
    [
        # 6 samples a step, of 10 tokens for 3 steps, 20 for 2, and 50 from then on
        ("iters", 0, "tokens", 0),
        ("iters", 3, "tokens", 180),
        ("iters", 4.5, "tokens", 180 + 180),
        ("samples", 33, "tokens", 420 + 150),
        ("samples", 33, "iters", 5.5),
        ("tokens", 420, "samples", 30),
        ("tokens", 90, "iters", 1.5),
        ("tokens", 420 + 300 * 7, "iters", 12),
    ],
)
def test_converting_a_length(unit: Any, length: float, into: Any, expected: float) -> None:
    training_plan = varying(Limits(iterations=9))
    assert training_plan.steps.convert(length, unit, into) == expected
    for done in range(9):
        resumed = varying(Limits(iterations=9), training_plan.before(done)).steps
        assert resumed.convert(length, unit, into) == expected


def test_converting_a_length_that_lies_in_steps_of_another_size() -> None:
    """4 steps of 8 samples where these would have 6: the steps before are taken to be alike."""
    steps = varying(Limits(iterations=9), Progress(4, 32, 400)).steps
    assert steps.convert(1, "iters", "tokens") == 100
    assert steps.convert(5, "iters", "tokens") == 400 + 120


def test_the_schedule_spans_both_parts_when_the_batch_size_changes() -> None:
    changes = {"training.train_iters": 8, "optimizer.lr_warmup_samples": 5}
    config = make_config({"batch.global_batch_size": 4, **changes})
    assert training_plan_of(config, 2, Progress(4, 32, 1024)).lr == LrLengths("samples", 5, 32 + 4 * 4, None)
