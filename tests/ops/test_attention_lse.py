"""The log-sum-exp of attention: equal to its formula, and enough to merge parts of the keys to the whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megazero.ops.attention import ATTENTION, AttentionFacts, MaskKind, attention
from megazero.ops.attention.call import AttentionCall
from megazero.ops.dropout import AttentionDropout
from tests.ops.lse import attention_with_lse
from tests.tables import over_table

S, B, HEADS, GROUPS, D = 48, 2, 4, 2, 16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
each_dtype = over_table("dtype", TOLERANCE, ids=str)


def qkv(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(2)
    shapes = ((S, B, HEADS, D), (S, B, GROUPS, D), (S, B, GROUPS, D))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def merged(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Parts' results [s, b, n d] weighed by their share of the denominator."""
    outs, lses = zip(*parts, strict=True)
    weights = torch.softmax(torch.stack(lses), 0).permute(0, 3, 1, 2)  # [parts, s, b, n]
    by_head = torch.stack(outs).unflatten(-1, (HEADS, D)).to(weights.dtype)
    return (by_head * weights.unsqueeze(-1)).sum(0).flatten(2).to(outs[0].dtype)


@each_dtype
@over_table("dropout", [False, True])
def test_two_halves_of_the_keys_merge_to_all(dtype: torch.dtype, dropout: bool) -> None:
    """Forward and backward, as ring attention goes round: the second half of the queries sees all of the
    first half's keys and its own in causal order; dropout is of the positions."""
    q, k, v = qkv(dtype)
    half = S // 2

    def drop(queries: range, keys: range) -> AttentionDropout | None:
        return AttentionDropout(0.3, torch.tensor([3, 9]), queries, keys) if dropout else None

    late, early = range(half, S), range(half)
    whole = attention(q, k, v, causal=True, dropout=drop(range(S), range(S)))
    ours = merged(
        [
            attention_with_lse(q[half:], k[:half], v[:half], causal=False, dropout=drop(late, early)),
            attention_with_lse(q[half:], k[half:], v[half:], causal=True, dropout=drop(late, late)),
        ]
    )
    tolerance = TOLERANCE[dtype]
    assert torch.allclose(ours, whole[half:], atol=tolerance, rtol=tolerance)
    grad = torch.randn(ours.shape).to(dtype)
    ours_grads = torch.autograd.grad(ours, (q, k, v), grad)
    true_grads = torch.autograd.grad(whole[half:], (q, k, v), grad)
    for got, true in zip(ours_grads, true_grads, strict=True):
        assert torch.allclose(got, true, atol=4 * tolerance * max(1.0, true.abs().max().item()))


@each_dtype
def test_it_is_the_log_of_the_summed_exponentials(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    _, lse = attention_with_lse(q, k, v, causal=True, scale=0.5)
    wide_q, wide_k = q.double(), k.double().repeat_interleave(HEADS // GROUPS, 2)
    scores = 0.5 * torch.einsum("sbnd,tbnd->bnst", wide_q, wide_k)
    scores = scores.masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), -torch.inf)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert lse.shape == (B, HEADS, S)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=4 * TOLERANCE[dtype])


@each_dtype
def test_every_implementation_that_serves_gives_the_references(dtype: torch.dtype) -> None:
    """Result, log-sum-exp and the gradients of both, with a query that may attend to nothing."""
    mask = torch.rand(B, 1, S, S) > 0.3
    mask[0, 0, 5] = False
    facts = AttentionFacts("cpu", dtype, MaskKind.DENSE, dropout=True, lse=True)
    dropout = AttentionDropout(0.2, torch.tensor([3, 9]), range(S), range(S), head_offset=4)

    def run(fn, dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.detach().to(dtype).requires_grad_() for each in qkv(facts.dtype)]
        out, lse = fn(*leaves, AttentionCall(0.25, mask=mask, dropout=dropout))
        assert (lse[0, :, 5] == -torch.inf).all()
        assert (out[5, 0] == 0).all()
        finite = lse.masked_fill(lse == -torch.inf, 0)
        loss = (out.sin().sum() + finite.sin().sum()).to(torch.float64)
        alone = torch.autograd.grad(finite.sum(), leaves[:2], retain_graph=True)
        return [out, finite, *alone, *torch.autograd.grad(loss, leaves)]

    truth = run(ATTENTION.reference, torch.float64)
    serving = [each for each in ATTENTION.implementations if each.serves(facts)]
    assert len(serving) >= (1 if dtype == torch.float16 else 2)
    for implementation in serving:
        for got, true in zip(run(implementation.fn, dtype), truth, strict=True):
            scale = max(1.0, true.abs().max().item())
            assert (got.double() - true).abs().max().item() <= 4 * TOLERANCE[dtype] * scale, implementation


def test_one_key_by_hand() -> None:
    """Two keys of scores 0 and log 3: the denominator is 4, the result leans three to one."""
    q = torch.tensor([1.0]).view(1, 1, 1, 1)
    k = torch.tensor([0.0, math.log(3)]).view(2, 1, 1, 1)
    v = torch.tensor([0.0, 4.0]).view(2, 1, 1, 1)
    out, lse = attention_with_lse(q, k, v, causal=True, scale=1.0)
    assert (out.item(), lse.item()) == pytest.approx((3.0, math.log(4)))


def test_documents_and_masks_restrict_the_sum():
    """With queries of zeros every score is 0, so the log-sum-exp is the log of how many keys count."""
    q, k, v = torch.zeros(4, 1, 1, 2), torch.randn(4, 1, 1, 2), torch.randn(4, 1, 1, 2)
    documents = torch.tensor([[5, 5, 9, 9]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]], dtype=torch.bool)

    def counted(**restrictions) -> list[int]:
        _, lse = attention_with_lse(q, k, v, **restrictions)
        return lse.exp().round().int().flatten().tolist()

    assert counted(causal=False) == [4, 4, 4, 4]
    assert counted(causal=True) == [1, 2, 3, 4]
    assert counted(causal=True, document_ids=documents) == [1, 2, 1, 2]
    assert counted(causal=False, document_ids=documents) == [2, 2, 2, 2]
    assert counted(causal=False, mask=mask[None, None]) == [3, 4, 3, 4]
    assert counted(causal=True, mask=mask[None, None], document_ids=documents) == [1, 2, 0, 2]
