"""Sinkhorn's assignment of tokens to experts (Clark et al. 2022, arXiv:2202.01169), as in Megatron-LM."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.moe.tokens import Tokens

_TOLERANCE = 1e-4
_TINY = 1e-8


@torch.no_grad()
def assignment(logits: Tensor, tokens: Tokens) -> Tensor:
    """Balance the scores of this rank's tokens so that experts share the micro-batch evenly: [n, E].

    Every rank balances all tokens of the micro-batch, in their order in the sequences, so that all layouts
    sum the same numbers in the same order.

    Args:
        logits: float32 [n, E].
    """
    order = tokens.whole(tokens.number).argsort(stable=True)
    whole = tokens.whole(logits)[order]
    real = None if tokens.real is None else tokens.whole(tokens.real)[order]
    balanced = sinkhorn(whole, real)
    return tokens.own(torch.empty_like(balanced).index_copy_(0, order, balanced))


def sinkhorn(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Scale the rows and columns of exp(logits) [n, E] in turn until all rows, and all columns, sum alike.

    The total is 1. It stops once the column factors change by less than 1e-4 on average.

    Args:
        logits: float32 [n, E].
        real: bool [n], rows that count; None for all.
    """
    cost = logits.exp()
    if real is not None:
        cost = cost * real.unsqueeze(1)
    rows, experts = cost.shape
    count = rows if real is None else real.sum().clamp_min(1)
    columns = cost.new_ones(experts)
    while True:
        of_rows = 1 / count / ((columns * cost).sum(1) + _TINY)
        before, columns = columns, 1 / experts / ((of_rows.unsqueeze(1) * cost).sum(0) + _TINY)
        # Meta tensors have no values to converge.
        if cost.is_meta or not (before - columns).abs().mean() > _TOLERANCE:
            return columns * cost * of_rows.unsqueeze(1)
