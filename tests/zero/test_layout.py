"""Where the parameters of a bucket lie, in integers."""

from __future__ import annotations

from dataclasses import replace

import torch

from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.zero.layout import BucketLayout, Segment, counted_parts, own_sums, present_parts
from megazero.zero.plan import BucketMember
from megazero.zero.table import STAGES
from tests.tables import over_table

SLICED = (Cut(0, "tp"),)


def member(name: str, *shape: int, group: int = 0, **traits) -> BucketMember:
    return BucketMember(
        ParamSpec(name, shape, InitialValues("zeros"), **traits), shape, torch.float32, group=group
    )


MEMBERS = (
    member("sliced", 3, cuts=SLICED),
    member("whole", 2, 2),
    member("nothing", 0, 5),
    member("norm", 2, weight_decay=False),
    member("other", 1, group=1),
)


def layout(stage: int, ranks: int, rank: int, tp_rank: int = 0, members=MEMBERS) -> BucketLayout:
    return BucketLayout(STAGES[stage], members, ranks, rank, ProcessGrid(tp=2).place(tp_rank))


def test_members_follow_each_other_and_are_padded_to_equal_slices():
    found = layout(1, 4, 2)
    assert found.spans == ((0, 3), (3, 7), (7, 7), (7, 9), (9, 10))
    assert (found.numel, found.shard_size, found.padded) == (10, 3, 12)
    assert found.own == slice(6, 9)
    empty = layout(1, 4, 2, members=(member("nothing", 0),))
    assert (empty.numel, empty.shard_size, empty.padded) == (0, 1, 4)


def test_slices_are_multiples_so_that_each_begins_aligned():
    def sizes(stage: int, ranks: int, numel: int) -> tuple[int, int]:
        found = replace(layout(stage, ranks, 0, members=(member("m", numel),)), multiple=128)
        return found.shard_size, found.padded

    for stage in (1, 2, 3):
        assert sizes(stage, 4, 512) == (128, 512)  # nothing is added to what fits
        assert sizes(stage, 4, 513) == (256, 1024)
        assert sizes(stage, 3, 1) == (128, 384)
        assert sizes(stage, 1, 513) == (513, 513)  # a single slice begins with its bucket
    assert sizes(0, 4, 513) == (129, 516)  # nobody has a slice
    found = replace(layout(1, 3, 2, members=(member("m", 700),)), multiple=128)
    assert found.own == slice(512, 768)
    assert [(n, span) for n, span, _ in found.member_pieces(torch.zeros(256))] == [(0, slice(512, 700))]


@over_table(
    ("stage", "state_range"),
    [(0, slice(0, 12)), (1, slice(3, 6)), (2, slice(3, 6)), (3, slice(3, 6))],
)
def test_what_is_cut_is_the_row_s_to_say(stage, state_range):
    found = layout(stage, 4, 1)
    assert found.state_range == state_range
    sums = torch.arange(12.0)[slice(3, 6) if stage >= 2 else slice(None)]
    assert own_sums(found, sums).tolist() == list(range(12))[state_range]


def test_segments_join_members_of_one_kind():
    traits = {"partial_grad": False}
    assert layout(1, 4, 0, tp_rank=1).segments == (
        Segment(0, 3, weight_decay=True, counted=True, **traits),
        Segment(3, 7, weight_decay=True, counted=False, **traits),
        Segment(7, 9, weight_decay=False, counted=False, **traits),
        Segment(9, 10, weight_decay=True, counted=False, group=1, **traits),
    )
    assert [(s.start, s.stop) for s in layout(1, 4, 0).member_segments] == list(layout(1, 4, 0).spans)


def test_only_one_copy_counts():
    assert counted_parts(layout(0, 2, 0)) == [slice(0, 3), slice(3, 7), slice(7, 9), slice(9, 10)]
    assert counted_parts(layout(0, 2, 0, tp_rank=1)) == [slice(0, 3)]
    assert counted_parts(layout(1, 4, 1)) == [slice(0, 3)]
    assert counted_parts(layout(1, 4, 1, tp_rank=1)) == []
    tied = (member("head", 3, cuts=SLICED, shared=True, tied_with="word"),)
    assert counted_parts(layout(0, 1, 0, members=tied)) == []


def test_padding_of_parameters_is_not_present():
    words = ParamSpec("words", (5, 3), InitialValues("zeros"), (Cut(0, "tp", padded_size=8),))
    members = (
        member("norm", 2),
        BucketMember(words, (4, 3), torch.float32),
        member("bias", 3),
    )
    # The second rank has one row of five; the first counts what both hold.
    assert present_parts(layout(0, 1, 0, members=members)) == [slice(0, 2), slice(2, 14), slice(14, 17)]
    assert present_parts(layout(0, 1, 0, 1, members)) == [slice(2, 5)]
    assert counted_parts(layout(0, 1, 0, 1, members)) == [slice(2, 14)]
    assert [present_parts(layout(2, 4, rank, 1, members)) for rank in range(4)] == [[slice(2, 5)], [], [], []]


def test_overlaps_are_relative_to_what_this_rank_updates():
    found = layout(2, 4, 1)  # elements 3 to 6
    assert found.overlap(0, 12) == slice(0, 3)
    assert found.overlap(4, 5) == slice(1, 2)
    for outside in ((0, 3), (6, 9), (0, 0), (5, 5)):
        where = found.overlap(*outside)
        assert where.start == where.stop


def test_pieces_of_a_rank():
    found = layout(1, 4, 2)  # elements 6 to 9: the last of `whole` and all of `norm`
    flat = torch.tensor([6.0, 7.0, 8.0])
    pieces = [(number, span, piece.tolist()) for number, span, piece in found.member_pieces(flat)]
    assert pieces == [(1, slice(3, 4), [6.0]), (3, slice(0, 2), [7.0, 8.0])]


def test_views_have_the_members_shapes():
    views = layout(1, 4, 0).views(torch.arange(12.0))
    assert [tuple(view.shape) for view in views] == [(3,), (2, 2), (0, 5), (2,), (1,)]
    assert views[1].tolist() == [[3.0, 4.0], [5.0, 6.0]]


@over_table("ranks", [1, 2, 3, 5])
@over_table("stage", range(len(STAGES)))
def test_ranks_hold_each_element_once_or_all_of_them(stage, ranks):
    held = [0] * layout(stage, ranks, 0).numel
    for rank in range(ranks):
        found = layout(stage, ranks, rank)
        for number, span, _ in found.member_pieces(torch.zeros(found.padded)[found.state_range]):
            start = found.spans[number][0]
            for element in range(start + span.start, start + span.stop):
                held[element] += 1
    assert held == [ranks if stage == 0 else 1] * 10
