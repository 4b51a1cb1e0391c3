"""Sinkhorn's assignment of tokens to experts (Clark et al. 2022, arXiv:2202.01169), as Megatron-LM's."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.moe.tokens import Tokens

_TOLERANCE = 1e-4
_TINY = 1e-8


@torch.no_grad()
def assignment(logits: Tensor, tokens: Tokens) -> Tensor:
    """Weigh the logits of this rank's tokens so that experts have even shares of the micro-batch: [n, E].

    All tokens of the micro-batch take part, in the order of their places, whatever ranks share them: so every
    layout sums the same numbers in the same order.

    Args:
        logits: float32 [n, E].
        tokens: this rank's share.
    """
    order = tokens.whole(tokens.number).argsort(stable=True)
    whole = tokens.whole(logits)[order]
    real = None if tokens.real is None else tokens.whole(tokens.real)[order]
    balanced = sinkhorn(whole, real)
    return tokens.own(torch.empty_like(balanced).index_copy_(0, order, balanced))


def sinkhorn(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Scale rows and columns of exp(logits) [n, E] in turn until each has an even share of the sum of 1.

    It ends as soon as the factors of the columns change by less than 1e-4 in the mean.

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
        # A plan computes no values, so there is nothing to wait for.
        if cost.is_meta or not (before - columns).abs().mean() > _TOLERANCE:
            return columns * cost * of_rows.unsqueeze(1)
