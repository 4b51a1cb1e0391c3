"""Documents evaluated one by one give what one mask over whole rows gives."""

from __future__ import annotations

import pytest
import torch

from megazero.ops.attention import attention, reference
from megazero.ops.attention.call import AttentionCall
from megazero.ops.attention.documents import Documents
from megazero.ops.attention.reference import attention_reference
from megazero.ops.dropout import AttentionDropout
from megazero.ops.scaled_softmax import scaled_softmax
from tests.tables import over_table

S = 420


def test_runs_are_counted_row_by_row():
    ids = torch.tensor([[4] * 300 + [0] * 120, [7] * 420, [1] * 180 + [2] * 120 + [-1] * 120])
    assert Documents(ids).lengths == [[300, 120], [420], [180, 120, 120]]


@over_table(
    ("ids", "why"),
    [
        (torch.tensor([[1] * 180 + [2] * 60 + [1] * 180]), "a document comes back"),
        (torch.tensor([[1] * 420, [*range(5), *[9] * 415]]), "nearly all pairs are of one document"),
        (torch.empty(2, 420, dtype=torch.int32, device="meta"), "nobody can read the ids"),
        (torch.empty(0, 420, dtype=torch.int32), "no rows"),
    ],
)
def test_other_ids_need_a_mask(ids, why):
    assert Documents(ids).lengths is None, why


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(
    "positions",
    [range(3, 3 + S), torch.arange(S).flip(0), (torch.arange(3 * S) * 7 % 999).view(S, 3)],
    ids=["range", "of all rows", "of each row"],
)
@pytest.mark.parametrize(
    "ids",
    [
        [[4] * 300 + [0] * 120, [7] * 420, [1] * 180 + [2] * 120 + [-1] * 120],
        [[4] * 300 + [0] * 120, [7] * 420, [1] * 180 + [2] * 60 + [1] * 180],
    ],
    ids=["runs", "a document comes back"],
)
def test_they_equal_the_formula_with_a_mask(ids, positions, dropped, causal):
    torch.manual_seed(2)
    leaves = [torch.randn(S, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
    ids = torch.tensor(ids)
    dropout = AttentionDropout(0.3, torch.tensor([5, 6, 7]), positions, positions, 1) if dropped else None
    ours = attention(*leaves, causal=causal, document_ids=ids, dropout=dropout, scale=0.7)
    mask = ids[:, None, :, None] == ids[:, None, None, :]
    if causal:
        mask = mask.tril()
    theirs, _ = attention_reference(*leaves, AttentionCall(0.7, mask=mask, dropout=dropout))
    upstream = torch.randn_like(ours)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    for mine, expected in zip(
        torch.autograd.grad(ours, leaves, upstream),
        torch.autograd.grad(theirs, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-10)


def test_dropout_of_another_batch_is_refused_before_rows_are_taken_apart():
    x = torch.zeros(S, 1, 1, 8)
    dropout = AttentionDropout(0.3, torch.tensor([5, 6]), range(S), range(S))
    with pytest.raises(ValueError, match="`keys` must hold one key per sequence"):
        attention(x, x, x, causal=False, document_ids=torch.zeros(1, S), dropout=dropout)


@over_table("causal", [False, True])
@over_table(("s", "masked"), [(24, False), (24, True), (5, False)])
def test_the_composition_has_the_softmax_compare_ids(s, masked, causal, monkeypatch):
    """In fp16 on a CPU, dropout takes it, as on a GPU; the bits are those with a mask of all pairs."""
    given = []

    def spied(scores, scale, causal, mask, *, document_ids=None):
        given.append((mask, document_ids))
        return scaled_softmax(scores, scale, causal, mask, document_ids=document_ids)

    monkeypatch.setattr(reference, "scaled_softmax", spied)
    torch.manual_seed(3)
    ids = torch.tensor([[0] * 9 + [1] + [2] * 10 + [0] * 4, [5] * 24], dtype=torch.int32)
    q, k, v = (
        torch.randn(length, 2, n, 8).half().requires_grad_() for length, n in ((s, 4), (24, 2), (24, 2))
    )
    dropout = AttentionDropout(0.3, torch.tensor([5, 6]), range(24 - s, 24), range(24))
    mask = torch.rand(2, 1, s, 24) < 0.8 if masked else None
    ours = attention(q, k, v, causal=causal, mask=mask, document_ids=ids, dropout=dropout)
    own = ids[:, None, 24 - s :, None] == ids[:, None, None, :]
    joined = own if mask is None else own & mask
    theirs = attention(q, k, v, causal=causal, mask=joined, dropout=dropout)
    (seen, compared), (dense, none) = given
    assert compared.equal(ids)
    assert none is None
    assert dense is not None
    assert (seen is None) == (not masked and (s == 24 or not causal))
    assert torch.equal(ours, theirs)
    upstream = torch.randn_like(ours)
    for a, b in zip(
        *(torch.autograd.grad(each, (q, k, v), upstream) for each in (ours, theirs)), strict=True
    ):
        assert torch.equal(a, b)
