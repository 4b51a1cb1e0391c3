"""Slices of parameters, and the keys of random streams."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megazero.mpu.context import thread_context
from megazero.mpu.grid import COMMUNICATORS, Place, ProcessGrid
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.mpu.rng import derive_key, sample_keys, site_key
from megazero.mpu.thread_group import ThreadWorld
from tests.tables import over_table

ZEROS = InitialValues("zeros")


def spec(shape: tuple[int, ...], *cuts: Cut, **changes) -> ParamSpec:
    return ParamSpec("w", shape, ZEROS, cuts, **changes)


def test_padded_vocabulary_slices():
    words, grid = spec((5, 2), Cut(0, "tp", padded_size=8)), ProcessGrid(tp=4)
    assert words.padded_shape == (8, 2)
    assert words.local_shape(grid.place(0)) == (2, 2)
    assert [words.offset(grid.place(r)) for r in range(4)] == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert [words.present(grid.place(r)) for r in range(4)] == [(2, 2), (2, 2), (1, 2), (0, 2)]
    whole = torch.arange(10.0).view(5, 2)
    assert words.shard(whole, grid.place(2)).tolist() == [[8.0, 9.0], [0.0, 0.0]]
    assert words.shard(whole, grid.place(3)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_the_elements_of_a_slice_that_are_not_padding():
    words, grid = spec((5, 2), Cut(0, "tp", padded_size=8)), ProcessGrid(tp=4)
    assert [words.present_elements(grid.place(r)) for r in range(4)] == [
        [range(4)],
        [range(4)],
        [range(2)],
        [],
    ]
    columns = spec((2, 3, 2), Cut(1, "tp", padded_size=4))
    first, second = (columns.present_elements(ProcessGrid(tp=2).place(r)) for r in range(2))
    assert (first, second) == ([range(8)], [range(0, 2), range(4, 6)])
    assert spec(()).present_elements(grid.place(1)) == [range(1)]
    assert spec((3, 0, 2)).present_elements(grid.place(1)) == []


@over_table(
    "each",
    [
        spec((3, 5, 4), Cut(0, "ep", padded_size=4), Cut(1, "etp", padded_size=6)),
        spec((3, 5, 7), Cut(0, "ep", padded_size=6), Cut(2, "etp", padded_size=12)),
        spec((4, 3), Cut(1, "tp", padded_size=8)),
        spec((4, 6), Cut(0, "tp")),
    ],
    ids=str,
)
def test_padding_is_what_a_slice_of_ones_lacks(each):
    for rank in range(4):
        place = Place(ProcessGrid(dp=2, ep=2, tp=2), rank)
        ones = each.shard(torch.ones(each.shape), place).flatten()
        present = [i for run in each.present_elements(place) for i in run]
        assert present == ones.nonzero().flatten().tolist()


@over_table(
    ("cuts", "local", "offsets"),
    [  # of the ranks (ep 0, tp 0), (ep 0, tp 1), (ep 1, tp 0), (ep 1, tp 1)
        ((), (4, 6, 3), [(0, 0, 0)] * 4),
        ((Cut(1, "tp"),), (4, 3, 3), [(0, 0, 0), (0, 3, 0)] * 2),
        ((Cut(0, "ep"),), (2, 6, 3), [(0, 0, 0)] * 2 + [(2, 0, 0)] * 2),
        (
            (Cut(0, "ep"), Cut(1, "etp", padded_size=8)),
            (2, 4, 3),
            [(0, 0, 0), (0, 4, 0), (2, 0, 0), (2, 4, 0)],
        ),
    ],
    ids=["whole", "tp", "ep", "both"],
)
def test_slices_of_experts_and_tensor_parallel_ranks(cuts, local, offsets):
    each, places = spec((4, 6, 3), *cuts), [Place(ProcessGrid(dp=2, ep=2, tp=2), rank) for rank in range(4)]
    assert [each.local_shape(place) for place in places] == [local] * 4
    assert [each.offset(place) for place in places] == offsets
    assert each.replicas == ("expert_replica" if "ep" in each.axes else "replica")


def test_a_slice_cut_twice_by_hand():
    experts = spec((2, 4), Cut(0, "ep"), Cut(1, "etp"))
    whole = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    slices = [experts.shard(whole, Place(ProcessGrid(dp=2, ep=2, tp=2), rank)).tolist() for rank in range(4)]
    assert slices == [[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]]


@over_table(
    "cuts",
    [
        (),
        *((Cut(dim, axis),) for dim in range(3) for axis in ("tp", "ep")),
        (Cut(0, "ep"), Cut(1, "etp")),
        (Cut(2, "etp"), Cut(0, "ep")),
        (Cut(0, "ep", padded_size=6), Cut(1, "etp", padded_size=12)),
    ],
    ids=str,
)
def test_unshard_undoes_shard(cuts):
    each, whole, world = spec((4, 8, 4), *cuts), torch.randn(4, 8, 4), ThreadWorld(8)

    def work(rank):
        context = thread_context(world, ProcessGrid(dp=4, ep=2, tp=2), rank)
        return each.unshard(each.shard(whole, context.place), context.groups)

    for result in world.run(work):
        assert torch.equal(result, whole)


def test_of_equal_copies_in_one_model_the_first_counts():
    grid = ProcessGrid(dp=4, ep=2, tp=2)
    first = [True, False] * 4
    # Dense parameters have replicas along `dp` and `ep`; along `tp` a bias has copies.
    assert [spec((4,)).counts_on(grid.place(r)) for r in range(8)] == first
    assert [spec((4,)).copy(grid.place(r)) for r in range(8)] == [(0, 2), (1, 2)] * 4
    assert [spec((4, 2), Cut(0, "ep")).counts_on(grid.place(r)) for r in range(8)] == first
    for cuts in ((Cut(0, "tp"),), (Cut(0, "ep"), Cut(1, "etp"))):
        assert all(spec((4, 2), *cuts).counts_on(grid.place(r)) for r in range(8))
        assert {spec((4, 2), *cuts).copy(grid.place(r)) for r in range(8)} == {(0, 1)}
    # One expert's whole parameter: ranks along `ep` hold others, those along `etp` copies.
    assert [spec((4,), expert=True).copy(grid.place(r)) for r in range(8)] == [(0, 2), (1, 2)] * 4
    assert {spec((4,), expert=True).copy(Place(ProcessGrid(dp=4, ep=4), r)) for r in range(4)} == {(0, 1)}
    assert spec((4,), expert=True).replicas == "expert_replica"
    assert not any(spec((4,), tied_with="v").counts_on(grid.place(r)) for r in range(8))


@over_table(
    ("shape", "cuts", "told"),
    [
        ((4, 4), (Cut(2, "tp"),), "not those dims"),
        ((4, 4), (Cut(0, "etp"), Cut(0, "ep")), "cut over one axis"),
        ((4, 4), (Cut(0, "tp"), Cut(1, "ep")), "two numberings"),
        ((4, 4), (Cut(0, "tp"), Cut(1, "tp")), "cuts one dim"),
        ((4, 4), (Cut(0, "dp"),), "the axes that cut are"),
        ((4, 4), (Cut(0, "tp", padded_size=2),), "holds more than that"),
    ],
)
def test_cuts_that_make_no_sense_are_refused(shape, cuts, told):
    with pytest.raises(AssertionError, match=told):
        spec(shape, *cuts)


def test_one_experts_parameter_is_not_cut_over_experts():
    with pytest.raises(AssertionError, match="but is of one expert"):
        spec((4, 4), Cut(0, "ep"), expert=True)
    with pytest.raises(AssertionError, match="two numberings"):
        spec((4, 4), Cut(0, "tp"), expert=True)


def test_a_dim_that_does_not_divide_is_refused():
    with pytest.raises(AssertionError, match=r"w \[6, 2\] does not divide by 4: Cut\(dim=0, axis='tp'"):
        spec((6, 2), Cut(0, "tp")).local_shape(Place(ProcessGrid(tp=4), 0))


def some_grid(draw: random.Random) -> ProcessGrid:
    """Any grid of at most 16 ranks."""
    while True:
        sizes = {axis: draw.randint(1, 4) for axis in ("pp", "dp", "cp", "tp", "ep", "etp")}
        stage = sizes["dp"] * sizes["cp"] * sizes["tp"]
        if stage % (sizes["ep"] * sizes["etp"]) == 0 and 1 < stage * sizes["pp"] <= 16:
            return ProcessGrid(**sizes)


def some_spec(draw: random.Random, grid: ProcessGrid) -> ParamSpec:
    """Any parameter that such a grid can cut, on a stage of its own."""
    dims = draw.sample(range(3), 3)
    shape, cuts = [draw.randint(1, 4) for _ in dims], []
    for axis in draw.choice((("ep", "etp"), ("ep",), ("tp",), ())):
        if axis != "etp" or draw.random() < 0.6:
            dim = dims.pop()
            padded = grid[axis] * draw.randint(1, 3)
            shape[dim] = draw.randint(1, padded)
            cuts.append(Cut(dim, axis, padded))
    return spec(tuple(shape), *draw.sample(cuts, len(cuts)), partial_grad=draw.random() < 0.5)


@over_table("seed", range(60))
def test_laws_of_any_cut_on_any_grid(seed):
    """Elements count once per replica; slices lie where offsets say; replicas hold one and the same slice."""
    draw = random.Random(seed)
    grid = some_grid(draw)
    each = some_spec(draw, grid)
    whole = torch.arange(1, 1 + torch.Size(each.shape).numel()).view(each.shape)
    axes = COMMUNICATORS[each.replicas]
    copies = len(grid.members(0, axes))
    counted = torch.zeros(each.shape, dtype=torch.long)
    stage = [rank for rank in range(grid.world_size) if grid.place(rank).index("pp") == 0]
    for rank in stage:
        place = grid.place(rank)
        local, offset, present = each.shard(whole, place), each.offset(place), each.present(place)
        assert local.shape == each.local_shape(place)
        here = tuple(slice(start, start + size) for start, size in zip(offset, present, strict=True))
        assert torch.equal(local[tuple(slice(size) for size in present)], whole[here])
        assert (local != 0).sum() == torch.Size(present).numel(), "what is no element is zero"
        if each.counts_on(place):
            counted[here] += 1
        same = [other for other in stage if each.offset(grid.place(other)) == offset]
        number, count = each.copy(place)
        assert len(same) == copies * count
        assert tuple(grid.members(rank, axes)) == tuple(
            r for r in same if each.copy(grid.place(r))[0] == number
        )
    assert torch.equal(counted, torch.full(each.shape, copies))


def test_keys_are_fixed_and_distinct():
    # Literal: a change here changes every model's initial weights.
    assert derive_key(1234, "init", "layers.0.mlp.up.weight") == 4269849974569900138
    keys = {derive_key(seed, name, i) for seed in (1, 2) for name in ("a", "b") for i in range(100)}
    assert len(keys) == 400
    assert derive_key(1, "2") != derive_key(1, 2)
    assert derive_key(1, "a", "b") != derive_key(1, "a/s:b")


def test_a_sample_keeps_its_key_in_any_micro_batch():
    whole = sample_keys(7, (4, 5, 6, 7))
    assert whole.dtype == np.int64
    assert sample_keys(7, (6,)).tolist() == [whole[2]]
    # Literal: a change here changes every model's dropout.
    assert whole.tolist()[0] == 7963640984636717978
    assert site_key("hidden", 3, "mlp_out") == 4348860779713105478
