"""Coordinates against grids drawn by hand."""

from __future__ import annotations

import pytest

from megazero.errors import ConfigError
from megazero.mpu import AXES, COMMUNICATORS, Coordinate, ProcessGrid

#           tp 0  tp 1
DRAWN = [  # pp 0
    [0, 1],  # dp 0
    [2, 3],  # dp 1
    #         pp 1
    [4, 5],  # dp 0
    [6, 7],  # dp 1
]


def test_pp2_dp2_tp2_is_the_drawn_grid():
    grid = ProcessGrid(pp=2, dp=2, tp=2)
    assert grid.world_size == 8
    for row, (pp, dp) in zip(DRAWN, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        for tp, rank in enumerate(row):
            assert grid.coordinate(rank) == Coordinate(pp=pp, dp=dp, cp=0, ep=0, tp=tp)
    assert grid.partition(("tp",)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.partition(("dp", "ep")) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.partition(("pp",)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert grid.partition(("pp", "tp")) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_expert_axis_divides_data_parallelism():
    grid = ProcessGrid(dp=2, ep=2, tp=2)
    assert grid.data_parallel_size == 4
    assert grid.partition(("ep",)) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.partition(COMMUNICATORS["data"]) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert grid.partition(COMMUNICATORS["expert_replica"]) == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 3, 1, 1, 2), (3, 1, 2, 2, 1), (2, 2, 2, 2, 2)])
def test_laws_of_every_grid(sizes):
    grid = ProcessGrid(**dict(zip(AXES, sizes, strict=True)))
    ranks = range(grid.world_size)
    assert [grid.rank(grid.coordinate(r)) for r in ranks] == list(ranks)
    for axes in COMMUNICATORS.values():
        groups = grid.partition(axes)
        assert sorted(r for g in groups for r in g) == list(ranks)
        assert {len(g) for g in groups} == {len(grid.members(0, axes))}
        for group in groups:
            assert all(grid.members(r, axes) == group for r in group)


def test_factor_leaves_the_rest_to_dp():
    assert ProcessGrid.factor(16, tp=2, pp=2, ep=2) == ProcessGrid(pp=2, dp=2, ep=2, tp=2)


def test_a_world_that_does_not_factor_is_refused():
    with pytest.raises(ConfigError, match=r"multiple of .* \(4 x 1 x 1 x 1 = 4\), but is 6"):
        ProcessGrid.factor(6, tp=4)
    with pytest.raises(ConfigError, match="`tp` must be at least 1, but is 0"):
        ProcessGrid(tp=0)
