"""The largest score of a call of attention, beside all scores written out."""

from __future__ import annotations

import pytest
import torch

from megazero.ops.attention import ALL, CAUSAL, AttentionCall, Documents, Part, Slopes, largest_score, scores
from megazero.ops.attention.pattern import Pattern
from megazero.ops.scaled_softmax import may_attend
from tests.tables import over_table

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 5, 6, 6, 6, 6, 6, 7, 7]])
CALLS = {
    "all": (9, AttentionCall(0.4)),
    "causal": (9, AttentionCall(0.4, pattern=CAUSAL)),
    "later queries": (4, AttentionCall(0.4, pattern=CAUSAL)),
    "window": (9, AttentionCall(0.4, pattern=Pattern(window=(2, 0)))),
    "sinks": (9, AttentionCall(0.4, documents=Documents(IDS), pattern=Pattern(window=(1, 0), sinks=1))),
    "documents": (9, AttentionCall(0.4, documents=Documents(IDS), pattern=CAUSAL)),
    "both ways": (9, AttentionCall(-0.4, documents=Documents(IDS))),
    "mask": (
        9,
        AttentionCall(0.4, mask=torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(3)) > 0.7),
    ),
    "part": (3, AttentionCall(0.4, documents=Documents(IDS), pattern=CAUSAL, part=Part(4, 0, IDS[:, 4:7]))),
    "earlier part": (3, AttentionCall(0.4, pattern=CAUSAL, part=Part(0, 0))),
    "bias": (9, AttentionCall(0.4, bias=Slopes(torch.tensor([1.0, 2.0, 3.0, 4.0])), pattern=CAUSAL)),
}


@over_table("name", CALLS)
@over_table("tile", [1, 70, 1 << 22])
def test_it_is_the_largest_of_all_that_are_seen(name, tile, monkeypatch):
    monkeypatch.setattr(scores, "TILE", tile)
    queries, call = CALLS[name]
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(queries, 2, 4, 3, generator=generator)
    k = torch.randn(9, 2, 2, 3, generator=generator)
    every = torch.einsum("sbnd,tbnd->bnst", q.double(), k.double().repeat_interleave(2, 2)) * call.scale
    seen = may_attend(queries, 9, q.device) if call.causal_alone(queries, 9) else call.allowed(q, k)
    wanted = every if seen is None else every.masked_fill(~seen, -torch.inf)
    assert largest_score(q, k, call).item() == pytest.approx(wanted.max().item(), rel=1e-6)
    assert largest_score(q.double(), k.double(), call).dtype == torch.float64


def test_nothing_seen_is_minus_infinity_and_nan_is_seen():
    q = k = torch.ones(2, 1, 1, 3)
    assert (
        largest_score(q, k, AttentionCall(1.0, mask=torch.zeros(2, 2, dtype=torch.bool))).item() == -torch.inf
    )
    assert largest_score(q[:0], k, AttentionCall(1.0, pattern=ALL)).item() == -torch.inf
    assert largest_score(q * torch.nan, k, AttentionCall(1.0)).isnan()
