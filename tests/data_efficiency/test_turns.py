from __future__ import annotations

import random

import numpy as np

from megazero.data_efficiency.sampler import owners, shares, shuffled
from tests.tables import over_table


def test_turns_by_hand():
    """Two of three samples are the second cluster's, so two of three turns."""
    clusters, turns = owners(np.arange(6), np.array([0, 1, 3]))
    assert clusters.tolist() == [1, 1, 0, 1, 1, 0]
    assert turns.tolist() == [0, 1, 0, 2, 3, 1]


def test_an_order_stays_what_it_was():
    """Runs that go on depend on it."""
    assert shuffled(8, 5).tolist() == [4, 5, 3, 6, 1, 0, 2, 7]
    assert shuffled(8, 6).tolist() == [3, 4, 7, 2, 5, 1, 0, 6]


@over_table("seed", range(100))
def test_turns_are_counted_without_a_gap(seed):
    rng = random.Random(seed)
    bounds = np.cumsum([0, *(rng.randrange(1, 9) for _ in range(rng.randrange(1, 14)))])
    draws, size = rng.randrange(200), int(bounds[-1])
    turns: list[list[int]] = [[] for _ in bounds[1:]]
    for cluster, before in zip(*owners(np.arange(draws), bounds), strict=True):
        turns[cluster].append(before)
    assert turns == [list(range(len(each))) for each in turns]
    found, laps = shares(np.array([draws, 7 * size]), np.stack([bounds, bounds]))
    assert found.tolist() == list(map(len, turns))
    assert np.abs(found - draws * np.diff(bounds) / size).max() <= 1 + np.log2(len(bounds))
    assert laps.tolist() == (7 * np.diff(bounds)).tolist()


def test_empty_clusters_at_the_end_have_no_turns():
    bounds = np.array([0, 2, 3, 3, 3, 3])
    clusters, _ = owners(np.arange(60), bounds)
    assert np.bincount(clusters).tolist() == [40, 20]
    assert shares(np.array([60]), bounds[None]).tolist() == [[40, 20, 0, 0, 0]]


def test_counts_beyond_32_bits():
    bounds = np.array([0, 10**9, 3 * 10**9])
    assert shares(np.array([6 * 10**11]), bounds[None]).tolist() == [[2 * 10**11, 4 * 10**11]]
    cluster, before = owners(np.array([6 * 10**11]), bounds)
    assert (cluster[0], before[0]) == (1, 4 * 10**11)
