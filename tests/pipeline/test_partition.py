"""Partitions: literal small ones, and optimality against every possible cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.errors import ConfigError
from megazero.pipeline.partition import partition, partition_blocks
from tests.tables import over_table


def sizes(ranges: list[range]) -> list[int]:
    return [len(each) for each in ranges]


def cuts(count: int, parts: int) -> list[list[range]]:
    """Every way to cut `count` items into `parts` contiguous parts."""
    inner = combinations(range(1, count), parts - 1)
    return [[range(a, b) for a, b in zip((0, *cut), (*cut, count), strict=True)] for cut in inner]


@over_table(
    ("weights", "parts", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1] * 7, 3, [3, 2, 2]),
        ([1] * 8, 3, [3, 3, 2]),
        ([5, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 5], 2, [3, 1]),
        ([9, 1, 1, 1, 1], 3, [1, 2, 2]),
        ([0, 0, 1, 0, 1, 0], 2, None),
        ([2.5, 0.5, 3.0], 3, [1, 1, 1]),
        ([7], 1, [1]),
    ],
)
def test_partition(weights, parts, expected):
    ranges = partition(weights, parts)
    assert ranges[0].start == 0
    assert ranges[-1].stop == len(weights)
    assert all(a.stop == b.start for a, b in pairwise(ranges))
    if expected is None:
        assert [sum(weights[i] for i in part) for part in ranges] == [1, 1]
    else:
        assert sizes(ranges) == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_no_cut_is_better(weights, data):
    parts = data.draw(st.integers(1, len(weights)))

    def loads(ranges: list[range]) -> list[int]:
        return [sum(weights[i] for i in part) for part in ranges]

    def badness(ranges: list[range]) -> tuple[int, int]:
        return max(loads(ranges)), sum(load**2 for load in loads(ranges))

    found = partition(weights, parts)
    assert all(found)
    assert found in cuts(len(weights), parts)
    assert badness(found) == min(map(badness, cuts(len(weights), parts)))


@pytest.mark.parametrize("parts", [0, 4])
def test_too_many_parts_are_refused(parts):
    with pytest.raises(ConfigError, match=rf"from 1 to the number of layers \(3\), but is {parts}"):
        partition([1, 1, 1], parts)


def deal(method: str, layers: int, chunks: int, *, embedding=0.0, weights=None, head=0.0, types=None):
    """The layers of each chunk of a model that begins with an embedding and ends with a head."""
    costs = [embedding, *(weights or [1.0] * layers), head]
    names = [None, *(types or ["TransformerLayer"] * layers), None]
    ranges = partition_blocks(method, chunks, costs=costs, types=names)
    assert [number for blocks in ranges for number in blocks] == [*range(layers + 2)]
    return [sum(names[number] is not None for number in blocks) for blocks in ranges]


@over_table(
    ("layers", "chunks", "expected"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (3, 3, [1, 1, 1]), (5, 1, [5])],
)
def test_uniform_counts_layers_alone(layers, chunks, expected):
    assert deal("uniform", layers, chunks, embedding=50, head=50) == expected


@over_table("method", ["parameters", "cost", "measured"])
def test_weighted_methods_count_embedding_and_head(method):
    assert deal(method, 12, 3) == [4, 4, 4]
    assert deal(method, 12, 3, embedding=2, head=2) == [4, 5, 3]
    assert deal(method, 10, 3, embedding=1, head=1) == [3, 4, 3]
    assert deal(method, 10, 4, embedding=9, head=9) == [1, 4, 4, 1]
    assert deal(method, 1, 1, embedding=3, head=4) == [1]
    assert deal(method, 4, 2, weights=[1, 1, 1, 3]) == [3, 1]


def test_type_balances_the_layers_whose_name_matches():
    types = ["Dense", "MoE", "Dense", "MoE", "Dense", "Dense", "MoE", "MoE"]
    assert deal("type:moe", 8, 2, embedding=99, head=99, types=types) == [6, 2]  # two of them in each


def test_a_block_that_is_no_layer_stays_with_the_next_layer():
    """As the embedding of a decoder does, which stands in the middle of the list."""
    types, costs = [None, "Encoder", "Encoder", None, "Decoder", None], [0, 3, 3, 9, 1, 1]
    assert partition_blocks("uniform", 3, costs=costs, types=types) == [range(2), range(2, 3), range(3, 6)]
    assert partition_blocks("cost", 2, costs=costs, types=types) == [range(3), range(3, 6)]
    assert partition_blocks("type:enc", 2, costs=costs, types=types) == [range(2), range(2, 6)]


def test_explicit_numbers():
    assert deal("5,6,6,5", 22, 4) == [5, 6, 6, 5]
    assert deal(" 1, 2 ", 3, 2) == [1, 2]


@over_table(
    ("method", "message"),
    [
        ("even", "but is `even`; choose one of them"),
        ("", "but is ``; choose one of them"),
        ("3,", "but is `3,`; choose one of them"),
        ("3,-3,4", "but is `3,-3,4`; choose one of them"),
        ("2,1", "must be 2 numbers of at least 1 that add up to 4 layers, but is `2,1` (2 numbers, sum 3)"),
        ("2,1,1", "but is `2,1,1` (3 numbers, sum 4)"),
        ("4,0", "numbers of at least 1"),
        ("type:(", "a regular expression after `type:`, but `(` is not one"),
        ("type:Expert", "`Expert` matches none of: TransformerLayer; correct it"),
    ],
)
def test_methods_that_do_not_fit_are_refused(method, message):
    with pytest.raises(ConfigError) as caught:
        deal(method, 4, 2)
    assert message in str(caught.value)


@over_table("method", ["uniform", "parameters", "type:Layer"])
def test_every_chunk_needs_a_layer(method):
    with pytest.raises(ConfigError, match=r"number of layers \(3\), but is 4; use fewer stages"):
        deal(method, 3, 4)
