"""Which tokens a rank routes: literal shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.layers.collectives import own_rows
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.moe.tokens import gather_shares, take_share
from megazero.ops.attention import Documents
from tests.moe.samples import joined, on_ranks, randn
from tests.tables import over_table


@dataclass(frozen=True)
class Share:
    """What one rank got: its tokens as lists, and the numbers of its rows in [s, b]."""

    sequence: list[int]
    position: list[int]
    real: list[bool] | None
    lengths: list[int]
    rows: list[float]


def shares(s: int, b: int, tp: int, *, split: bool = False, **given) -> list[Share]:
    """The shares of [s, b, 1] whose rows hold their numbers, counted from 1."""
    x = torch.arange(1.0, s * b + 1).view(s, b, 1)

    def work(context) -> Share:
        placement = Placement.of(context, torch.float32, sequence_parallel=split)
        own = own_rows(x, context.tp) if split else x
        documents = Documents(given["ids"]) if "ids" in given else None
        given_rows = Rows(given.get("positions", range(s)), documents, spread=placement.spread)
        rows, tokens = take_share(own, given_rows)
        assert tokens.count == len(rows)
        real = None if tokens.real is None else tokens.real.tolist()
        lists = (tokens.sequence.tolist(), tokens.position.tolist(), real, tokens.lengths.tolist())
        return Share(*lists, rows.flatten().tolist())

    return on_ranks(work, tp, tp=tp)


def test_one_rank_has_all_tokens_column_by_column():
    expected = Share([0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2], None, [3, 3], [1, 2, 3, 4, 5, 6])
    assert shares(3, 2, 1) == [expected]


def test_ranks_share_them_evenly():
    assert shares(3, 2, 2) == [
        Share([0, 1, 0], [0, 0, 1], None, [3, 3], [1, 2, 3]),
        Share([1, 0, 1], [1, 2, 2], None, [3, 3], [4, 5, 6]),
    ]


def test_the_last_shares_end_in_rows_that_are_no_tokens():
    found = shares(3, 2, 4)
    both = [True, True]
    assert [each.rows for each in found] == [[1, 2], [3, 4], [5, 6], [0, 0]]
    assert [each.real for each in found] == [both, both, both, [False, False]]
    assert [each.position for each in found[:3]] == [[0, 0], [1, 1], [2, 2]]
    assert {tuple(each.lengths) for each in found} == {(3, 3)}
    found = shares(5, 1, 2)
    assert [each.rows for each in found] == [[1, 2, 3], [4, 5, 0]]
    assert [each.real for each in found] == [[True] * 3, [True, True, False]]
    found = shares(1, 1, 4)
    assert [each.rows for each in found] == [[1], [0], [0], [0]]
    assert [each.real for each in found] == [[True], [False], [False], [False]]


def test_under_sequence_parallelism_a_rank_routes_the_rows_that_it_has():
    assert shares(4, 2, 2, split=True) == [
        Share([0, 1, 0, 1], [0, 0, 1, 1], None, [4, 4], [1, 2, 3, 4]),
        Share([0, 1, 0, 1], [2, 2, 3, 3], None, [4, 4], [5, 6, 7, 8]),
    ]
    assert [each.rows for each in shares(4, 2, 4, split=True)] == [[1, 2], [3, 4], [5, 6], [7, 8]]


@over_table(
    ("positions", "expected"),
    [
        (range(7, 10), [7, 7, 8, 8, 9, 9]),
        (torch.tensor([4, 0, 2]), [4, 4, 0, 0, 2, 2]),
        (torch.tensor([[0, 5], [1, 0], [2, 1]]), [0, 5, 1, 0, 2, 1]),
    ],
)
def test_positions_are_those_of_the_batch(positions, expected):
    (whole,) = shares(3, 2, 1, positions=positions)
    assert whole.position == expected
    assert joined(each.position for each in shares(3, 2, 2, positions=positions)) == expected


@over_table(("tp", "split"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_padding_is_no_token_and_other_documents_are(tp, split):
    """[b, s]: the second sequence holds two documents, and padding is -1."""
    ids = torch.tensor([[0, 0, -1, -1], [0, 0, 1, -1], [-1, -1, -1, -1]], dtype=torch.int32)
    found = shares(4, 3, tp, split=split, ids=ids)
    assert joined(each.real for each in found) == [
        *(True, True, False),
        *(True, True, False),
        *(False, True, False),
        *(False, False, False),
    ]
    assert {tuple(each.lengths) for each in found} == {(2, 3, 0)}


@over_table(
    ("s", "b", "tp", "split"),
    [
        (5, 1, 1, False),
        (5, 1, 2, False),
        (3, 3, 4, False),
        (1, 1, 4, False),
        (8, 2, 2, True),
        (8, 3, 4, True),
    ],
)
def test_what_is_given_back_is_whole_and_so_is_its_gradient(s, b, tp, split):
    x, to = randn(1, s, b, 2), randn(2, s, b, 2)

    def work(context) -> tuple[Tensor, Tensor]:
        placement = Placement.of(context, torch.float64, sequence_parallel=split)
        leaf = (own_rows(x, context.tp) if split else x).clone().requires_grad_()
        rows, _ = take_share(leaf, Rows(range(s), spread=placement.spread))
        out = gather_shares(rows * 3, leaf.shape, placement.spread)
        out.backward(own_rows(to, context.tp) if split else to)
        return out.detach(), leaf.grad

    def whole(parts: Sequence[Tensor]) -> Tensor:
        if split:
            return torch.cat(list(parts))
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]

    found, grads = zip(*on_ranks(work, tp, tp=tp), strict=True)
    assert torch.equal(whole(found), 3 * x)
    assert torch.equal(whole(grads), 3 * to)


def test_masked_values_whole_values_and_own_ones():
    def work(context):
        placement = Placement.of(context, torch.float32)
        ids = torch.tensor([[0, 0, -1], [0, -1, -1]], dtype=torch.int32)
        x = torch.arange(6.0).view(3, 2, 1)
        rows, tokens = take_share(x, Rows(range(3), Documents(ids), spread=placement.spread))
        every = tokens.everywhere()
        whole = tokens.whole(rows).flatten().tolist()
        own = torch.equal(tokens.own(tokens.whole(rows)), rows)
        return (
            tokens.masked(rows + 1).flatten().tolist(),
            whole,
            own,
            every.sequence.tolist(),
            every.real.tolist(),
        )

    for ranks in (1, 2, 4):
        found = on_ranks(work, ranks, tp=ranks)
        blanks = [0.0] * (-6 % ranks)
        assert joined(masked for masked, *_ in found) == [1, 2, 3, 0, 0, 0, *blanks]
        for _, whole, own, sequence, real in found:
            assert own
            assert whole == [0, 1, 2, 3, 4, 5, *blanks]
            assert sequence[:6] == [0, 1] * 3
            assert real == [True, True, True, False, False, False, *map(bool, blanks)]
