"""The order of a cyclic training."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from megazero.data import shuffle
from megazero.data.shuffle import cyclic_sample
from tests.tables import over_table


def epoch(number: int, size: int, seed: int = 7) -> list[int]:
    return [cyclic_sample(number * size + i, size, seed) for i in range(size)]


def test_the_order_is_the_same_for_ever():
    """Checkpoints hold no order, so a run that continues after an update relies on these numbers."""
    assert epoch(0, 10, seed=1234) == [0, 3, 6, 1, 2, 7, 5, 4, 9, 8]
    assert epoch(1, 10, seed=1234) == [5, 0, 8, 4, 3, 2, 6, 7, 1, 9]
    late = [cyclic_sample(10**15 + i, 146_000_000, 1234) for i in range(4)]
    assert late == [113562046, 18213536, 145550539, 74950496]


@over_table("size", [*range(1, 20), 31, 32, 33, 63, 64, 65, 1000])
def test_an_epoch_holds_each_sample_once(size):
    for number in (0, 1, 2, 10**9):
        for seed in (0, 1234):
            assert sorted(epoch(number, size, seed)) == list(range(size))


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {tuple(epoch(number, 50, seed)) for number in range(20) for seed in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize("size", [5, 8, 12])
def test_an_order_cannot_be_told_from_a_random_one(size):
    """Which sample stands where, and which follows which: chi-square, at most five deviations off."""
    count = 1500
    orders = np.array([epoch(number, size) for number in range(count)])
    places, follows = np.zeros((size, size)), np.zeros((size, size))
    for i in range(size):
        np.add.at(places[i], orders[:, i], 1)
        if i + 1 < size:
            np.add.at(follows, (orders[:, i], orders[:, i + 1]), 1)
    for found, freedom in (
        (places, (size - 1) ** 2),
        (follows[~np.eye(size, dtype=bool)], size * (size - 1)),
    ):
        expected = found.sum() / found.size
        chi_square = ((found - expected) ** 2).sum() / expected
        assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_the_size_of_the_data_costs_neither_time_nor_memory(monkeypatch):
    """Megatron shuffles the whole epoch: a gigabyte and many seconds for 150 million samples."""
    passes = []
    real = shuffle._network
    monkeypatch.setattr(shuffle, "_network", lambda *args: passes.append(1) or real(*args))
    size = 10**15 + 1
    tracemalloc.start()
    began = time.perf_counter()
    found = [cyclic_sample(5 * size + i, size, 3) for i in range(1000)]
    seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(found)) == 1000
    assert 0 <= min(found) <= max(found) < size
    assert len(passes) < 2 * 1000, "each sample takes fewer than two passes on average"
    assert peak < 500_000
    assert seconds < 5.0
