"""Packing places every sequence once, wastes little, and is the same every time."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.models.bert_batch import Slot, pack

CAPACITY = 10


def test_the_longest_goes_first_and_each_into_the_first_row_that_has_room():
    assert pack([5, 3, 4, 2, 2], 8) == [Slot(0, 0), Slot(0, 5), Slot(1, 0), Slot(1, 4), Slot(1, 6)]


def test_of_equals_the_earlier_one_goes_first():
    assert pack([3, 3, 3], 6) == [Slot(0, 0), Slot(0, 3), Slot(1, 0)]


def test_sequences_that_fill_their_row_stay_in_order():
    assert pack([8, 8], 8) == [Slot(0, 0), Slot(1, 0)]
    assert pack([1], 8) == [Slot(0, 0)]


@pytest.mark.parametrize("lengths", [[0], [9], [4, -1]])
def test_what_cannot_be_placed_is_a_bug(lengths):
    with pytest.raises(AssertionError, match="must fit into 8"):
        pack(lengths, 8)


def fewest_rows(lengths: tuple[int, ...]) -> int:
    """By trying: the first sequence shares a row with some of the others, the rest takes what it takes."""
    if not lengths:
        return 0
    first, *others = lengths
    numbers = range(len(others))
    shared = (chosen for count in range(len(others) + 1) for chosen in combinations(numbers, count))
    return 1 + min(
        fewest_rows(tuple(others[i] for i in numbers if i not in chosen))
        for chosen in shared
        if first + sum(others[i] for i in chosen) <= CAPACITY
    )


@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=6))
def test_every_sequence_has_a_place_of_its_own_in_few_rows(lengths):
    slots = pack(lengths, CAPACITY)
    assert len(slots) == len(lengths)
    rows = 1 + max(slot.row for slot in slots)
    assert {slot.row for slot in slots} == set(range(rows))
    for row in range(rows):
        spans = sorted((s.column, s.column + n) for s, n in zip(slots, lengths, strict=True) if s.row == row)
        # They begin at 0 and leave no hole, which a batch counts on.
        assert spans[0][0] == 0
        assert all(end == start for (_, end), (start, _) in pairwise(spans))
        assert spans[-1][1] <= CAPACITY
    assert rows <= 11 / 9 * fewest_rows(tuple(lengths)) + 1
