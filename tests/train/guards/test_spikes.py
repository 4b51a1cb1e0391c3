"""What is a spike: literal values, and laws of the estimate."""

from __future__ import annotations

import math
import random

from megazero.train.step.spikes import Recent
from tests.tables import over_table


def steady(count: int, loss: float = 2.0, norm: float = 1.0) -> Recent:
    """After so many updates whose losses and norms take turns around these."""
    recent = Recent()
    for i in range(count):
        recent = recent.after(loss + 0.01 * (-1) ** i, norm * 1.1 ** (-1) ** i, 64)
    return recent


def test_nothing_is_a_spike_before_there_is_something_to_compare_with():
    assert steady(19).spikes(100.0, 200.0, 10) == []
    assert [each.what for each in steady(20).spikes(100.0, 200.0, 10)] == ["loss", "gradient norm"]


def test_the_limit_is_so_many_robust_deviations_above_the_median():
    """Losses 1, 2, 3, 4, 5 in turns: the median is 3 and the median distance from it 1."""
    recent = Recent()
    for i in range(25):
        recent = recent.after(1.0 + i % 5, 1.0, 64)
    limit = 3.0 + 2 * 1.4826
    assert recent.spikes(limit - 1e-9, 1.0, 2) == []
    (found,) = recent.spikes(limit + 1e-9, 1.0, 2)
    assert (found.what, found.usual) == ("loss", 3.0)
    assert math.isclose(found.limit, limit)


def test_small_rises_of_a_steady_run_are_none():
    recent = steady(40)
    assert recent.spikes(2.19, 120.0, 10) == []
    assert [each.what for each in recent.spikes(2.21, 120.0, 10)] == ["loss"]
    assert [each.what for each in recent.spikes(2.0, 130.0, 10)] == ["gradient norm"]


def test_spikes_do_not_hide_the_next_one():
    recent = steady(64)
    for _ in range(20):
        recent = recent.after(50.0, 900.0, 64)
    assert len(recent.spikes(50.0, 900.0, 10)) == 2


def test_the_window_forgets():
    recent = steady(64)
    for _ in range(64):
        recent = recent.after(9.0, 1.0, 64)
    assert recent.spikes(9.0, 1.0, 10) == []
    assert len(recent.losses) == len(recent.norms) == 64


@over_table(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (1.0, 0.0)])
def test_what_is_not_finite_is_no_part_of_it(loss, norm):
    recent = steady(30)
    assert recent.after(loss, norm, 64) == recent


def test_calm_returns_ten_steps_later():
    assert Recent().calm(1)
    assert [Recent(spike=7).calm(i) for i in (7, 16, 17)] == [False, False, True]


@over_table("seed", range(20))
def test_healthy_noise_is_no_spike(seed):
    """A loss that falls, and norms that vary by factors, as those of real trainings do."""
    draw, recent = random.Random(seed), Recent()
    for i in range(1500):
        loss = 2.5 + 4.0 / (1 + i / 40) + draw.gauss(0, 0.15)
        norm = math.exp(draw.gauss(0, 0.35)) * (1 + 20 / (1 + i / 5))
        assert recent.spikes(loss, norm, 10) == []
        recent = recent.after(loss, norm, 128)
