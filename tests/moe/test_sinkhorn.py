"""The assignment of tokens to experts: Megatron-LM's numbers, even shares, and no trace of the layout."""

from __future__ import annotations

import torch

from megazero.moe.sinkhorn import sinkhorn
from tests.moe.samples import inputs, route
from tests.oracle.experts import assigned
from tests.tables import over_table

ONE = {"moe_router_topk": 1, "moe_router_load_balancing_type": ("sinkhorn",)}
LOGITS = [[2.0, 0.0, -1.0], [2.0, 1.0, 0.0], [2.5, -0.5, 0.5], [1.5, 1.0, 1.0]]


def drawn(rows: int, experts: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))


@over_table("shape", [(4, 3), (64, 8), (257, 16)])
def test_it_is_megatrons(shape):
    logits = drawn(*shape)
    torch.testing.assert_close(sinkhorn(logits).double(), assigned(logits.double()), rtol=1e-5, atol=1e-6)


def test_all_rows_and_columns_have_even_shares():
    shares = sinkhorn(drawn(64, 8))
    torch.testing.assert_close(shares.sum(0), torch.full((8,), 1 / 8), rtol=1e-3, atol=0)
    torch.testing.assert_close(shares.sum(1), torch.full((64,), 1 / 64), rtol=1e-3, atol=0)


def test_padding_takes_no_share():
    logits, real = drawn(12, 4), torch.arange(12) % 3 > 0
    shares = sinkhorn(logits, real)
    assert shares[~real].eq(0).all()
    torch.testing.assert_close(shares[real], sinkhorn(logits[real]), rtol=1e-5, atol=1e-8)


def test_training_chooses_by_shares_and_weighs_by_logits():
    """Expert 0 is the first choice of all four tokens, and gets less of them than all."""
    one = route(LOGITS, given=inputs([0, 1, 2, 3]), **ONE)
    assert len({expert for (expert,) in one.experts.tolist()}) > 1
    torch.testing.assert_close(one.weights, torch.tensor(LOGITS).sigmoid().gather(1, one.experts))
    two = route(LOGITS, given=inputs([0, 1, 2, 3]), **{**ONE, "moe_router_topk": 2})
    torch.testing.assert_close(two.weights, torch.tensor(LOGITS).softmax(1).gather(1, two.experts))


def test_evaluation_takes_the_best():
    assert route(LOGITS, **ONE).experts.tolist() == [[0]] * 4


def test_a_plan_needs_no_values():
    assert sinkhorn(torch.empty(8, 4, device="meta")).shape == (8, 4)
