"""Boxes: laws over small shapes, held against what torch's own indexing and counting say."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megazero.checkpoint.box import Box, boxes_of_span, gaps_or_overlaps
from tests.tables import over_table

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def spans(draw):
    """A shape and a range of its flattened elements."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4).map(tuple))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


def box_within(draw, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))


@st.composite
def several_boxes(draw, least: int = 0, most: int = 4):
    """A shape and boxes within it, empty ones included."""
    shape = draw(SHAPES)
    return shape, [box_within(draw, shape) for _ in range(draw(st.integers(least, most)))]


def counts(shape: tuple[int, ...], boxes: list[Box]) -> torch.Tensor:
    """The number of boxes that cover each element."""
    found = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        found[box.slices] += 1
    return found


def test_the_boxes_of_a_range_by_hand():
    boxes = list(boxes_of_span((4, 3), 2, 10))
    assert boxes == [Box((0, 2), (1, 1)), Box((1, 0), (2, 3)), Box((3, 0), (1, 1))]
    assert list(boxes_of_span((2, 6), 7, 9)) == [Box((1, 1), (1, 2))], "within a row"
    assert list(boxes_of_span((), 0, 1)) == [Box((), ())]
    assert list(boxes_of_span((2, 2), 3, 3)) == []
    assert str(Box((128, 0), (64, 32))) == "[128:192,0:32]"


@given(spans())
def test_the_boxes_of_a_range_cover_it_in_order(case):
    shape, start, stop = case
    numbers = torch.arange(math.prod(shape)).view(shape)
    boxes = list(boxes_of_span(shape, start, stop))
    found = [i for box in boxes for i in numbers[box.slices].flatten().tolist()]
    assert found == list(range(start, stop))
    assert all(box.numel for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1), "few pieces, whatever the range"


@given(several_boxes(least=2, most=2))
def test_an_overlap_is_what_both_have(case):
    shape, (a, b) = case
    common = a.overlap(b)
    assert common == b.overlap(a)
    both = (counts(shape, [a]) + counts(shape, [b])) == 2
    assert both.equal(counts(shape, [common] if common else []) == 1)
    assert common is None or common.numel == both.sum()


@given(several_boxes(least=2, most=2))
def test_a_box_is_found_in_the_memory_of_another(case):
    shape, (a, b) = case
    numbers = torch.arange(math.prod(shape)).view(shape)
    common = a.overlap(b)
    if common:
        assert numbers[a.slices][common.within(a)].equal(numbers[common.slices])
        assert a.shifted(n * 10 for n in a.offset).offset == tuple(11 * n for n in a.offset)


@given(several_boxes())
def test_gaps_and_overlaps_are_those_of_a_count(case):
    shape, boxes = case
    found = counts(shape, boxes)
    wrong = gaps_or_overlaps(shape, boxes)
    assert (wrong is None) == bool((found == 1).all())
    if wrong:
        assert ("overlap" in wrong) == bool((found > 1).any())


@given(SHAPES, st.data())
def test_ranges_one_after_the_other_are_a_whole(shape, data):
    cuts = data.draw(st.lists(st.integers(0, math.prod(shape)), max_size=4).map(sorted))
    ends = [0, *cuts, math.prod(shape)]
    boxes = [box for a, b in pairwise(ends) for box in boxes_of_span(shape, a, b)]
    assert gaps_or_overlaps(shape, data.draw(st.permutations(boxes))) is None


@over_table(
    ("shape", "boxes", "why"),
    [
        ((2, 2), [Box((0, 0), (2, 3))], "[2, 3] at [0, 0] is not within the shape [2, 2]"),
        ((2, 2), [Box((0, 0), (2,))], "[2] at [0, 0] is not within the shape [2, 2]"),
        # This one ended in a ValueError, which a loader does not take for damage.
        ((2, 2), [Box((0,), (2, 2))], "[2, 2] at [0] is not within the shape [2, 2]"),
        ((), [Box((), ()), Box((), ())], "[] and [] overlap"),
        ((), [], "0 of 1 elements are there"),
        ((4,), [Box((0,), (2,)), Box((3,), (1,))], "3 of 4 elements are there"),
    ],
)
def test_what_is_wrong_is_said(shape, boxes, why):
    assert gaps_or_overlaps(shape, boxes) == why


@over_table("shape", [(0,), (3, 0), (0, 3)])
def test_a_tensor_without_elements_is_whole(shape):
    assert gaps_or_overlaps(shape, []) is None
    assert gaps_or_overlaps(shape, [Box.whole(shape)]) is None
