"""Coordinates against grids drawn by hand."""

from __future__ import annotations

import pytest

from megazero.config.tree.parallel import ParallelConfig
from megazero.errors import ConfigError
from megazero.mpu.grid import AXES, COMMUNICATORS, ProcessGrid, as_ranks, slice_axes
from megazero.mpu.launch import grid_of
from tests.tables import over_table

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
            indices = {"pp": pp, "dp": dp, "cp": 0, "tp": tp}
            assert {axis: grid.place(rank).index(axis) for axis in indices} == indices
            assert grid.rank(indices) == rank
    assert grid.partition(("tp",)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.partition(("dp",)) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.partition(("pp",)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert grid.partition(("pp", "tp")) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_stages_meet_at_a_ranks_other_indices():
    grid = ProcessGrid(pp=4, tp=2)
    assert [tuple(grid.at_stages(rank, (0, -1))) for rank in (0, 7, 2)] == [(0, 6), (1, 7), (2,)]
    assert [tuple(grid.at_stages(rank, (0, 2, 3))) for rank in (1, 4, 2)] == [(1, 5, 7), (0, 4, 6), (2,)]
    assert tuple(ProcessGrid(tp=2).at_stages(1, (0, -1))) == (1,)


def test_by_default_experts_share_what_tensor_parallel_ranks_do():
    grid = ProcessGrid(dp=4, ep=2, tp=2)
    assert (grid.edp, grid.ep, grid.etp) == (2, 2, 2)
    assert grid.partition(("ep",)) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.partition(("etp",)) == grid.partition(("tp",))
    assert grid.partition(COMMUNICATORS["data"]) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert grid.partition(COMMUNICATORS["expert"]) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert grid.partition(COMMUNICATORS["expert_replica"]) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert grid.partition(COMMUNICATORS["replica"]) == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_experts_number_the_ranks_their_own_way():
    """Two replicas of two tensor-parallel ranks hold a quarter of the experts each: none are replicas."""
    grid = ProcessGrid(pp=2, dp=2, tp=2, ep=4, etp=1)
    assert grid.edp == 1
    assert grid.partition(("ep",)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [grid.place(rank).index("ep") for rank in range(8)] == [0, 1, 2, 3] * 2
    assert grid.partition(COMMUNICATORS["expert_replica"]) == tuple((rank,) for rank in range(8))
    sliced = ProcessGrid(dp=4, ep=1, etp=2)
    assert sliced.edp == 2
    assert sliced.partition(("etp",)) == ((0, 1), (2, 3))
    assert sliced.partition(COMMUNICATORS["expert_replica"]) == ((0, 2), (1, 3))


def test_experts_that_do_not_divide_a_stage_are_refused():
    told = (
        r"^`expert_model_parallel_size` \(3\) x `expert_tensor_parallel_size` \(1\) must divide the ranks "
        "of a pipeline stage, but there are 4; choose sizes whose product divides that$"
    )
    with pytest.raises(ConfigError, match=told):
        ProcessGrid(pp=3, dp=4, ep=3)


def test_what_the_communicators_span():
    assert tuple(AXES) == ("pp", "dp", "cp", "tp", "edp", "ep", "etp")
    assert dict(COMMUNICATORS) == {
        "pp": ("pp",),
        "cp": ("cp",),
        "tp": ("tp",),
        "ep": ("ep",),
        "etp": ("etp",),
        "sequence": ("cp", "tp"),
        "data": ("dp",),
        "replica": ("dp", "cp"),
        "expert_replica": ("edp",),
        "expert": ("ep", "etp"),
        "batch": ("dp", "cp"),
        "stage": ("dp", "cp", "tp"),
        "model": ("pp", "tp"),
        "world": ("pp", "dp", "cp", "tp"),
    }
    assert slice_axes("replica") == ("tp",)
    assert slice_axes("expert_replica") == ("ep", "etp")


def test_who_reads_one_batch_and_who_holds_one_model():
    grid = ProcessGrid(pp=2, dp=2, cp=2, tp=2)
    assert grid.members(5, COMMUNICATORS["batch"]) == range(1, 9, 2)
    assert grid.members(5, COMMUNICATORS["stage"]) == range(8)
    assert grid.members(5, COMMUNICATORS["model"]) == (4, 5, 12, 13)


@over_table(
    "sizes",
    [
        (1, 1, 1, 1, 1, 1),
        (2, 3, 1, 2, 3, 2),
        (3, 2, 2, 1, 2, 1),
        (2, 2, 2, 2, 2, 2),
        (1, 3, 1, 4, 6, 2),
        (2, 4, 1, 2, 8, 1),
    ],
)
def test_laws_of_every_grid(sizes):
    grid = ProcessGrid(**dict(zip(("pp", "dp", "cp", "tp", "ep", "etp"), sizes, strict=True)))
    ranks = range(grid.world_size)
    for names in (("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp")):
        assert [grid.rank({axis: grid.place(r).index(axis) for axis in names}) for r in ranks] == list(ranks)
    for axes in COMMUNICATORS.values():
        groups = grid.partition(axes)
        assert sorted(r for g in groups for r in g) == list(ranks)
        assert {len(g) for g in groups} == {len(grid.members(0, axes))}
        for group in groups:
            assert all(tuple(grid.members(r, axes)) == group for r in group)
            assert all(as_ranks(grid.members(r, axes)) == grid.members(r, axes) for r in group)


def test_factor_leaves_the_rest_to_dp():
    assert ProcessGrid.factor(16, tp=2, pp=2, ep=2) == ProcessGrid(pp=2, dp=4, ep=2, tp=2)
    assert ProcessGrid.factor(8, tp=2, ep=8, etp=1) == ProcessGrid(dp=4, ep=8, tp=2, etp=1)


def test_every_axis_has_its_setting():
    sizes = {axis.setting: 2 for axis in AXES.values() if axis.setting is not None}
    assert grid_of(ParallelConfig(**sizes), 32) == ProcessGrid(pp=2, dp=4, cp=2, ep=2, tp=2, etp=2)
    sizes["expert_tensor_parallel_size"] = None
    assert grid_of(ParallelConfig(**sizes), 32).etp == 2


def test_a_world_that_does_not_factor_is_refused():
    told = r"`pipeline_model_parallel_size` \(2\) x `tensor_model_parallel_size` \(2\) = 4, but is 6;"
    with pytest.raises(ConfigError, match=told):
        ProcessGrid.factor(6, pp=2, tp=2)
    with pytest.raises(ConfigError, match="`tp` must be at least 1, but is 0"):
        ProcessGrid(tp=0)


def test_nodes_and_peers_cross_in_one_replica():
    """Eight replicas beside two tensor-parallel ranks, in nodes of four."""
    grid = ProcessGrid(dp=8, tp=2)
    assert tuple(grid.node(11, 4)) == (9, 11, 13, 15)
    assert tuple(grid.peers(11, 4)) == (3, 11)
    assert grid.peers(11, 1) == grid.members(11, COMMUNICATORS["replica"])
    assert tuple(grid.peers(11, 8)) == (11,)
    for rank in range(16):
        assert set(grid.node(rank, 4)) & set(grid.peers(rank, 4)) == {rank}


def test_ranks_that_are_equally_far_apart_take_no_memory_each():
    grid = ProcessGrid.factor(16384, tp=8, pp=16)
    for name in ("world", "stage", "replica", "data", "batch", "expert_replica"):
        assert isinstance(grid.members(5000, COMMUNICATORS[name]), range), name
    assert grid.members(5000, COMMUNICATORS["model"]) == tuple(
        4096 // 4 * p + 904 + t for p in range(16) for t in range(8)
    )


@over_table(
    ("ranks", "form"),
    [
        ((3,), range(3, 4)),
        ((0, 4), range(0, 8, 4)),
        ((1, 3, 5), range(1, 7, 2)),
        ((0, 1, 4), (0, 1, 4)),
        ((4, 0), (4, 0)),
        (range(0, 12, 5), range(0, 15, 5)),
    ],
)
def test_equal_ranks_have_one_form(ranks, form):
    assert as_ranks(ranks) == form
    assert hash(as_ranks(ranks)) == hash(form)
    assert tuple(as_ranks(ranks)) == tuple(ranks)
