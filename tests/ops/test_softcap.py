"""Bounded scores: no kernel that does not know a bound takes a call with one."""

from __future__ import annotations

import pytest
import torch

from megazero.ops.attention import (
    ATTENTION,
    CAUSAL,
    AttentionCall,
    AttentionFacts,
    BiasKind,
    MaskKind,
    Softcap,
    attend,
)
from tests.ops.lse import attention_with_lse

KNOW_BOUNDS = {"flex", "composed", "reference"}


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_only_implementations_that_bound_scores_are_chosen(device):
    for mask in MaskKind:
        for dropout, lse in ((False, False), (True, False), (False, True)):
            for dtype in (torch.float32, torch.bfloat16):
                facts = AttentionFacts(device, dtype, mask, dropout, lse, bias=BiasKind.SOFTCAP)
                for traced in (False, True):
                    assert ATTENTION.choose(facts, traced=traced).name in KNOW_BOUNDS


def test_a_bound_is_a_tanh_of_the_scores():
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(7, 2, 3, 4, generator=draw) * 3 for _ in range(3))
    scores = 0.5 * torch.einsum("sbnd,tbnd->bnst", q, k)
    assert scores.abs().max() > 5
    bounded = (2 * torch.tanh(scores / 2)).masked_fill(torch.ones(7, 7).triu(1) > 0, -torch.inf)
    expected = torch.einsum("bnst,tbnd->sbnd", bounded.softmax(-1), v).flatten(2)
    call = AttentionCall(0.5, bias=Softcap(2.0), pattern=CAUSAL)
    torch.testing.assert_close(attend(q, k, v, call), expected)
    _, lse = attention_with_lse(q, k, v, causal=True, scale=0.5, bias=Softcap(2.0))
    torch.testing.assert_close(lse, bounded.logsumexp(-1))
