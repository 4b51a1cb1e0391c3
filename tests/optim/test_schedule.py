from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from megazero.config.steps import Progress
from megazero.config.training_plan import TrainingPlan, training_plan_of
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.optimizer import OptimizerConfig
from megazero.config.tree.training import BatchConfig, TrainingConfig
from megazero.errors import ConfigError
from megazero.optim.schedule import (
    Cycles,
    Decay,
    LearningRate,
    Warmup,
    WeightDecay,
    build_learning_rate,
    build_weight_decay,
)
from tests.tables import over_table


def rates(schedule, counts, unit="iteration"):
    return [schedule.at(Progress(**{unit: count})) for count in counts]


def training_plan(optimizer: OptimizerConfig, training=None) -> TrainingPlan:
    """Of 100 steps, 800 samples and 51200 tokens, unless `training` says otherwise."""
    config = Config(
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=64),
        batch=BatchConfig(micro_batch_size=8),
        optimizer=optimizer,
        training=TrainingConfig(**(training or {"train_iters": 100})),
    )
    return training_plan_of(config, 1)


def make(training=None, **fields):
    optimizer = OptimizerConfig(lr=1.0, **fields)
    return build_learning_rate(optimizer, training_plan(optimizer, training))


def test_first_update_with_warmup_has_the_initial_rate():
    schedule = make(lr_warmup_iters=4, lr_decay_style="constant")
    assert rates(schedule, range(6)) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_warmup_starts_at_lr_warmup_init():
    schedule = make(lr_warmup_iters=4, lr_warmup_init=0.2, lr_decay_style="constant")
    assert rates(schedule, [0, 2, 4]) == pytest.approx([0.2, 0.6, 1.0])


def test_linear_falls_to_the_floor_and_stays():
    schedule = make(lr_warmup_iters=20, min_lr=0.2)
    assert rates(schedule, [20, 60, 100, 101, 10**9]) == pytest.approx([1.0, 0.6, 0.2, 0.2, 0.2])


def test_cosine_is_half_way_down_at_half_time():
    schedule = make(lr_decay_style="cosine", min_lr=0.5)
    assert rates(schedule, [0, 25, 50, 100]) == pytest.approx([1.0, 0.75 + 0.25 * 2**-0.5, 0.75, 0.5])


def test_inverse_square_root_leaves_the_warmup_continuously():
    schedule = make(lr_decay_style="inverse-square-root", lr_warmup_iters=4, min_lr=0.3)
    assert rates(schedule, [4, 16, 25, 81]) == pytest.approx([1.0, 0.5, 0.4, 0.3])


def test_inverse_square_root_without_a_warmup_counts_samples():
    """As in Megatron, to which an iteration is a global batch of samples: 8 of them here."""
    wanted = [1.0, 8**-0.5, 32**-0.5]
    schedule = make(lr_decay_style="inverse-square-root")
    assert rates(schedule, [0, 1, 4]) == pytest.approx(wanted)
    schedule = make(lr_decay_style="inverse-square-root", training={"train_samples": 800})
    assert rates(schedule, [0, 8, 32], "samples") == pytest.approx(wanted)


@over_table(
    ("style", "middle"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_is_stable_then_falls(style, middle):
    schedule = make(lr_decay_style="WSD", lr_wsd_decay_iters=20, lr_wsd_decay_style=style)
    assert rates(schedule, [0, 50, 80, 90, 100, 101]) == pytest.approx([1.0, 1.0, 1.0, middle, 0.0, 0.0])


def test_each_cycle_starts_at_the_peak_and_is_longer_by_the_factor():
    """Warmup until 10; cycles of 20 and 40, and the third is cut off at 100, the end of the decay."""
    schedule = make(lr_decay_style="cosine-restarts", lr_warmup_iters=10, lr_cycle_iters=20, lr_cycle_mult=2)
    assert rates(schedule, [5, 10, 20, 30, 50, 70, 100, 101]) == [0.5, 1, 0.5, 1, 0.5, 1, 0, 0]
    plain = make(lr_decay_style="cosine-restarts", lr_cycle_iters=25, min_lr=0.5)
    assert rates(plain, [0, 25, 50, 75, 99]) == pytest.approx([1, 1, 1, 1, 0.5], abs=2e-3)
    assert rates(plain, [100]) == [0.5], "no cycle starts when the decay is over"


@over_table(("first", "growth"), [(7, 1), (1, 1), (1, 2), (3, 2), (5, 3), (200, 2)])
def test_cycles_are_those_of_torch(first, growth):
    param = torch.nn.Parameter(torch.zeros(()))
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        torch.optim.SGD([param], lr=1.0), first, growth, eta_min=0.1
    )
    ours = LearningRate(1.0, 0.1, Warmup(), Decay("cosine-restarts", 150, cycles=Cycles(first, growth)))
    for count in range(150):
        assert ours.at(Progress(iteration=count)) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), count
        theirs.optimizer.step()
        theirs.step()


def test_restarts_are_met_exactly():
    """Whatever the logarithm is rounded to: at each start of a cycle, and one unit before it."""
    for first, growth in itertools.product((1, 3, 1000, 10**12), (1.0, 1.5, 2.0, 3.0, 10.0, 1000.0)):
        cycles, start, length = Cycles(first, growth), 0, first
        while start + length < 10**15 and start < 50 * first:
            assert cycles.share(start) == 0
            start, length = start + length, length * growth
            assert 1 - 1.001 / (length / growth) <= cycles.share(start - 1) < 1


def test_unit_follows_the_lengths_given():
    by_tokens = make(lr_decay_tokens=1000, lr_warmup_tokens=100)
    assert by_tokens.at(Progress(iteration=77, samples=77, tokens=50)) == 0.5
    by_samples = make(lr_decay_samples=400)
    assert by_samples.at(Progress(iteration=1, samples=100, tokens=9999)) == 0.75


@over_table(
    ("length", "unit", "decay"),
    [
        ("train_iters", "iters", 100),
        ("train_samples", "samples", 800),
        ("train_tokens", "tokens", 51200),
    ],
)
def test_without_lengths_the_schedule_spans_the_training(length, unit, decay):
    schedule = make({length: decay})
    assert (schedule.unit, schedule.decay.length) == (unit, decay)


def test_warmup_alone_in_tokens_takes_the_decay_length_in_tokens():
    schedule = make(lr_warmup_tokens=512)
    assert (schedule.unit, schedule.decay.length, schedule.warmup.length) == ("tokens", 51200, 512)


def test_warmup_fraction_is_of_the_decay_length():
    assert make(lr_decay_iters=50, lr_warmup_fraction=0.05).warmup.length == 2.5


@over_table(
    ("fields", "words"),
    [
        ({"lr_warmup_iters": 100}, ["shorter than the decay of 100", "`lr_warmup_iters`"]),
        ({"min_lr": 2.0, "lr_warmup_init": 3.0}, ["`min_lr`", "`lr_warmup_init`"]),
        ({"lr_decay_style": "WSD"}, ["`lr_wsd_decay_iters` must be set"]),
        ({"lr_decay_style": "cosine-restarts"}, ["`lr_cycle_iters` must be set"]),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 101}, ["at most the decay length (100)"]),
    ],
)
def test_values_that_make_no_schedule_are_refused(fields, words):
    with pytest.raises(ConfigError) as error:
        make(**fields)
    assert all(word in str(error.value) for word in words)


def test_weight_decay_moves_over_the_training():
    config = OptimizerConfig(
        lr=1.0, start_weight_decay=0.0, end_weight_decay=0.4, weight_decay_incr_style="linear"
    )
    schedule = build_weight_decay(config, training_plan(config))
    assert rates(schedule, [0, 200, 800, 801], "samples") == pytest.approx([0.0, 0.1, 0.4, 0.4])


def test_constant_weight_decay_is_the_configured_one():
    config = OptimizerConfig(lr=1.0, weight_decay=0.3)
    schedule = build_weight_decay(config, training_plan(config))
    assert rates(schedule, [0, 50, 10**6]) == [0.3, 0.3, 0.3]


@over_table(
    ("fields", "word"),
    [
        ({"weight_decay_incr_style": "linear"}, "must be set"),
        ({"start_weight_decay": 0.1}, "must be unset"),
        (
            {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
            "at least",
        ),
    ],
)
def test_bad_weight_decay_is_refused(fields, word):
    config = OptimizerConfig(lr=1.0, **fields)
    with pytest.raises(ConfigError, match=word):
        build_weight_decay(config, training_plan(config))


def test_a_constant_weight_decay_may_not_move():
    with pytest.raises(ConfigError, match="linear or cosine"):
        WeightDecay(0.1, 0.2)


class _FakeOptimizer:
    def __init__(self):
        self.param_groups = [{}]


def megatron_values(counts, learning_rate, weight_decay):
    scheduling = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    scheduler = scheduling.OptimizerParamScheduler(
        _FakeOptimizer(),
        init_lr=learning_rate.warmup.start,
        max_lr=learning_rate.peak,
        min_lr=learning_rate.floor,
        lr_warmup_steps=learning_rate.warmup.length,
        lr_decay_steps=learning_rate.decay.length,
        lr_decay_style=learning_rate.decay.style,
        start_wd=weight_decay.start,
        end_wd=weight_decay.end,
        wd_incr_steps=weight_decay.length,
        wd_incr_style=weight_decay.style,
        wsd_decay_steps=learning_rate.decay.final_length,
        lr_wsd_decay_style=learning_rate.decay.final_style,
    )
    values = []
    for count in counts:
        scheduler.num_steps = count
        scheduler.step(0)
        values.append((scheduler.get_lr({}), scheduler.get_wd()))
    return values


DECAYS = [
    *(Decay(style, 97) for style in ("constant", "linear", "cosine", "inverse-square-root")),
    *(Decay("WSD", 97, final, 31) for final in ("exponential", "linear", "cosine", "minus_sqrt")),
]
WARMUPS = [Warmup(), Warmup(7, 1e-5), Warmup(9.7)]
WEIGHT_DECAYS = [
    WeightDecay(0.1, 0.1, "constant", 60),
    WeightDecay(0.0, 0.3, "linear", 60),
    WeightDecay(0.01, 0.1, "cosine", 60),
]


@over_table("decay", DECAYS, ids=lambda d: f"{d.style}-{d.final_style}")
def test_every_value_equals_megatron_core(decay):
    counts = range(110)
    for warmup, floor, weight_decay in itertools.product(WARMUPS, (0.0, 3e-5), WEIGHT_DECAYS):
        schedule = LearningRate(3e-4, floor, warmup, decay)
        ours = [(schedule.at(Progress(iteration=n)), weight_decay.at(Progress(iteration=n))) for n in counts]
        assert ours == megatron_values(counts, schedule, weight_decay)


def test_iterations_and_samples_agree_for_a_constant_batch():
    by_iteration = LearningRate(1.0, 0.1, Warmup(10), Decay("cosine", 100))
    by_sample = dataclasses.replace(
        by_iteration, warmup=Warmup(80), decay=Decay("cosine", 800), unit="samples"
    )
    for n in range(120):
        progress = Progress(iteration=n, samples=8 * n)
        assert by_iteration.at(progress) == pytest.approx(by_sample.at(progress), rel=1e-14)
