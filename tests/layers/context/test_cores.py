"""Attention on ranks that share a sequence is that of one: results, gradients, bytes, pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megazero.layers.context import core
from megazero.layers.context.core import in_order, out_of_order
from megazero.layers.context.masks import PairMasks
from megazero.layers.context.ring import Ring
from megazero.layers.inputs import Attends
from megazero.layers.rows import columns_of
from megazero.ops.attention import BlockLayout, Documents, Pattern
from tests.layers.context.sharing import Problem, _Of, alone, exchange, gather, ring, shared
from tests.tables import over_table

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [3] * 23 + [-1]])
LAYOUT = BlockLayout(torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.5, 4)
PROBLEMS = {
    "causal": Problem(),
    "both ways": Problem(causal=False),
    "one group": Problem(groups=1),
    "many heads": Problem(groups=4),
    "documents": Problem(documents=DOCUMENTS),
    "documents both ways": Problem(documents=DOCUMENTS, causal=False),
    "window": Problem(pattern=Pattern((3, 0))),
    "window both ways": Problem(pattern=Pattern((4, 2)), causal=False),
    "wide window": Problem(pattern=Pattern((15, 0)), documents=DOCUMENTS),
    "window and first tokens": Problem(pattern=Pattern((2, 0), sinks=3)),
    "window and first tokens of documents": Problem(pattern=Pattern((2, 0), sinks=2), documents=DOCUMENTS),
    "window both ways and first tokens": Problem(pattern=Pattern((3, 1), sinks=4), causal=False),
    "prefix": Problem(pattern=Pattern(prefix=13)),
    "blocks": Problem(pattern=Pattern(layout=LAYOUT)),
    "dropout": Problem(dropout=0.4),
    "dropout of documents": Problem(dropout=0.4, documents=DOCUMENTS),
    "slopes": Problem(slopes=True),
    "offset": Problem(offset=True),
    "everything": Problem(
        pattern=Pattern((9, 0)), documents=DOCUMENTS, dropout=0.3, slopes=True, offset=True, batch=2
    ),
}
RANKS = ((1, ring), (2, ring), (3, ring), (4, ring), (2, exchange), (4, exchange), (2, gather), (3, gather))


@pytest.mark.fast
@pytest.mark.slow
@over_table("problem", PROBLEMS.values(), ids=PROBLEMS)
@over_table(("ranks", "maker"), RANKS)
@over_table("zigzag", [True, False], ids=["zigzag", "runs"])
def test_it_is_that_of_one_rank(problem, ranks, maker, zigzag):
    ours, _ = shared(problem, ranks, maker, zigzag)
    for name, x, y in zip(("out", "q", "k", "v", "offset"), ours, alone(problem), strict=True):
        # Attention by places of its own takes linear biases in fp32.
        near = 1e-6 if problem.slopes else 1e-9
        torch.testing.assert_close(x, y, rtol=0, atol=near, msg=lambda text, name=name: f"{name}: {text}")


@over_table("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_heads_that_go_around_in_turns_change_nothing(problem, monkeypatch):
    monkeypatch.setattr(core, "MOST_AT_ONCE", 1)
    ours, logs = shared(problem, 2, ring)
    monkeypatch.undo()
    together, of_one_turn = shared(problem, 2, ring)
    for x, y in zip(ours, together, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    for log, one in zip(logs, of_one_turn, strict=True):
        assert log.payload == one.payload
        assert log.calls["cp", "send"] == problem.groups * one.calls["cp", "send"]


def test_columns_are_dealt_from_both_ends():
    assert [list(map(list, columns_of(rank, 2, 8, zigzag=True))) for rank in (0, 1)] == [
        [[0, 1], [6, 7]],
        [[2, 3], [4, 5]],
    ]
    assert [list(run) for run in columns_of(1, 2, 6, zigzag=False)] == [[3, 4, 5]]
    assert columns_of(0, 1, 5, zigzag=True) == (range(5),)


@over_table("ranks", [1, 2, 3, 4])
def test_rows_are_put_in_order_and_back(ranks):
    runs = [run for rank in range(ranks) for run in columns_of(rank, ranks, 24, zigzag=ranks > 1)]
    x = torch.tensor([column for run in runs for column in run])
    assert in_order(x, ranks).tolist() == list(range(24))
    assert out_of_order(in_order(x, ranks), ranks).equal(x)


def ring_of(ranks: int, rank: int, length: int, masks: PairMasks, zigzag: bool = True) -> Ring:
    group = _Of(ranks)
    group.rank = rank
    return Ring(group, length, zigzag, masks)


def seen_pairs(masks: PairMasks, own: tuple[range, ...], length: int) -> int:
    """The pairs that queries of these columns compute, by brute force."""
    allowed = masks.attends.pattern.allowed(
        masks.attends.causal, range(length), range(length), torch.device("cpu")
    )
    assert allowed is not None
    return sum(int(allowed[..., run.start : run.stop, :].sum()) for run in own)


@over_table("ranks", [2, 3, 4, 8])
def test_a_zigzag_gives_ranks_equal_work(ranks):
    length, masks = 48 * 16, PairMasks(Attends(0, causal=True), 1.0)
    work = [seen_pairs(masks, columns_of(rank, ranks, length, zigzag=True), length) for rank in range(ranks)]
    assert max(work) / min(work) <= 1.02
    # Every step but the first has as many pairs on each rank: half of the products with all that is sent.
    for rank in range(ranks):
        here = ring_of(ranks, rank, length, masks)
        areas = [
            sum(len(range(*p.queries.indices(length))) * len(range(*p.keys.indices(length))) for p in pairs)
            for pairs in (here.pairs(step) for step in range(1, ranks))
        ]
        assert set(areas) == {2 * (length // (2 * ranks)) ** 2}


def received(log, operation="recv") -> int:
    return log.payload["cp", operation]


@over_table("ranks", [2, 3, 4])
def test_a_ring_gets_the_keys_that_its_queries_see(ranks):
    """Half of the keys of ranks before, all of those behind; gradients in fp32 go back the same way."""
    problem = Problem(dtype=torch.bfloat16)
    piece = problem.length // (2 * ranks)
    row = 2 * problem.batch * problem.groups * problem.size  # keys and values
    _, logs = shared(problem, ranks, ring)
    for rank, log in enumerate(logs):
        rows = piece * (rank + 2 * (ranks - 1 - rank))
        home = sum(piece * (1 if reader > rank else 2) for reader in range(ranks) if reader != rank)
        assert received(log) == row * (2 * rows * 2 + home * 4)
    total = sum(received(log) for log in logs)
    everything = ranks * (ranks - 1) * 2 * piece * row
    assert total == 0.75 * everything * (2 * 2 + 4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_exchange_sends_each_row_once(ranks):
    problem = Problem(groups=4)
    _, logs = shared(problem, ranks, exchange)
    rows, channels = problem.length // ranks * problem.batch, problem.size * 8
    for log in logs:
        # Queries, keys, values and the result; and their gradients.
        assert log.payload["cp", "all_to_all"] == rows * channels * (4 + 2 * 4 + 4) * 2


def test_a_gather_gets_all_keys_once():
    problem = Problem()
    _, logs = shared(problem, 2, gather)
    whole = problem.length * problem.batch * problem.groups * problem.size * 8
    assert all(log.payload["cp", "all_gather"] == 2 * whole for log in logs)
    assert all(log.payload["cp", "reduce_scatter"] == 2 * whole for log in logs)


@pytest.mark.parametrize("zigzag", [True, False])
def test_nothing_is_sent_that_a_window_hides(zigzag):
    ranks, length = 4, 64
    masks = PairMasks(Attends(0, True, pattern=Pattern((3, 0))), 1.0)
    for reader in range(ranks):
        mine = columns_of(reader, ranks, length, zigzag=zigzag)
        for owner in range(ranks):
            theirs = columns_of(owner, ranks, length, zigzag=zigzag)
            expected = {
                k for keys in theirs for k in keys if any(0 <= q - k <= 3 for run in mine for q in run)
            }
            sent = [column for part in masks.needed(mine, theirs) for column in part]
            assert len(sent) == len(set(sent))
            # Both ends of a rank's own pieces are seen, so nothing is left out between them.
            assert set(sent) == (expected if owner != reader else {k for keys in theirs for k in keys})
    _, logs = shared(Problem(length=64, pattern=Pattern((3, 0))), ranks, ring, zigzag=False)
    three = 3 * 2 * 2 * 2 * 8 * 8  # the last keys and values of the rank before, in fp64
    # Twice those, forward and backward, and the gradients of its own from the rank behind.
    assert [received(log) for log in logs] == [three, 3 * three, 3 * three, 2 * three]


def test_nothing_is_sent_between_documents():
    """One document on each rank: all know it from the same ids, and nobody waits for a message."""
    ids = torch.arange(4).repeat_interleave(6).expand(2, -1).contiguous()
    ours, logs = shared(Problem(documents=ids), 4, ring, zigzag=False)
    assert [received(log) for log in logs] == [0, 0, 0, 0]
    for x, y in zip(ours, alone(Problem(documents=ids)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
    long = torch.tensor([[0] * 7 + [1] * 5 + [2] * 12, [3] * 6 + [4] * 18])
    problem = Problem(documents=long)
    ours, logs = shared(problem, 4, ring, zigzag=False)
    for x, y in zip(ours, alone(problem), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
    assert received(logs[0]) > 0  # the gradients of its document's first tokens, which rank 1 goes on with


def test_documents_are_compared_once_for_all_layers(monkeypatch):
    documents, compared = Documents(DOCUMENTS[:1]), []
    monkeypatch.setattr(np, "isin", lambda *given, isin=np.isin: compared.append(1) or isin(*given))
    for layer in range(3):
        masks = PairMasks(Attends(layer, causal=True), 1.0, documents=documents)
        assert masks.seen(range(12, 24), range(12)) == range(5, 12)
    assert len(compared) == 1


def test_ids_on_a_device_that_the_host_cannot_read_hide_nothing():
    ids = torch.empty(1, 8, dtype=torch.int32, device="meta")
    masks = PairMasks(Attends(0, causal=True), 1.0, documents=Documents(ids))
    assert masks.seen(range(4, 8), range(4)) == range(4)
    known = PairMasks(
        Attends(0, causal=True), 1.0, documents=Documents(ids, None, np.array([[0] * 4 + [1] * 4]))
    )
    assert not known.seen(range(4, 8), range(4))


def test_errors_in_bf16_do_not_grow_with_the_ranks():
    problem = Problem(length=192, size=16, dtype=torch.bfloat16)
    exact = alone(Problem(length=192, size=16))
    errors = []
    for ranks in (1, 2, 4, 8):
        ours, _ = shared(problem, ranks, ring)
        pairs = zip(ours[:4], exact[:4], strict=True)
        errors.append([float((x.double() - y).abs().max()) for x, y in pairs])
    for one, *more in zip(*errors, strict=True):
        assert max(more) <= 1.25 * one, errors


def test_a_query_that_sees_nothing_gives_zeros():
    layout = BlockLayout(torch.zeros(1, 6, 6, dtype=torch.bool), 4)
    layout.blocks[:, 3:, 0] = True
    problem = Problem(pattern=Pattern(layout=layout))
    ours, _ = shared(problem, 3, ring)
    assert not ours[0][:12].any()
    assert not ours[1][:12].any()
    for x, y in zip(ours, alone(problem), strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


def test_the_fused_call_is_one_for_each_rank():
    masks = PairMasks(Attends(0, causal=True), 1.0)
    for rank in range(4):
        assert [len(ring_of(4, rank, 64, masks).pairs(step)) for step in range(4)] == [1, 1, 1, 1]
    both_ways = PairMasks(Attends(0, causal=False), 1.0)
    assert len(ring_of(4, 1, 64, both_ways).pairs(2)) == 1
