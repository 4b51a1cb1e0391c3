"""The tree over ranks: everybody but the first is a child once, and the work of a rank has a bound."""

from __future__ import annotations

from megazero.mpu.tree import FAN, children, parent, pause_of, tiers
from tests.tables import over_table


@over_table("size", [1, 2, 3, FAN, FAN + 1, FAN + 2, 1000, 16384])
def test_every_rank_but_the_first_has_one_parent(size):
    below = {rank: children(rank, size) for rank in range(size)}
    assert sorted(child for ranks in below.values() for child in ranks) == list(range(1, size))
    assert all(parent(child) == rank for rank, ranks in below.items() for child in ranks)
    assert all(len(ranks) <= FAN for ranks in below.values())
    assert parent(0) is None


def test_a_small_job_is_a_star():
    assert children(0, FAN + 1) == range(1, FAN + 1)
    assert not children(1, FAN + 1)


def test_the_way_up_is_short():
    rank, steps = 16383, 0
    while (above := parent(rank)) is not None:
        rank, steps = above, steps + 1
    assert steps == 3


def test_pauses_grow_once_all_ranks_together_would_ask_too_often():
    assert pause_of(0.1, 8, 10_000) == 0.1
    assert pause_of(0.1, 16384, 10_000) == 1.6384


@over_table(
    ("size", "members"),
    [
        (1, []),
        (2, [2]),
        (8, [8]),
        (64, [64]),
        (72, [36, 2]),
        (134, [2, 67]),
        (1024, [64, 16]),
        (16384, [64, 64, 4]),
    ],
)
def test_tiers_reach_all_ranks(size, members):
    assert [len(group) for group in tiers(0, size)] == members
    assert all(rank in group for rank in range(size) for group in tiers(rank, size))
    largest = list(range(size))
    for number in range(len(members)):
        largest = [max(largest[other] for other in tiers(rank, size)[number]) for rank in range(size)]
    assert largest == [size - 1] * size


def test_tiers_are_groups_of_ranks_that_see_the_same():
    for number in range(2):
        groups = [tiers(rank, 1024)[number] for rank in range(1024)]
        assert all(groups[other] == group for group in groups[:70] for other in group)
