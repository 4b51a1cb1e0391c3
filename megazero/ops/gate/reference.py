"""The gate as its formulas read."""

from __future__ import annotations

import enum

from torch import Tensor

_TINY = 1e-20


class Gating(enum.Enum):
    """The way from logits to weights: a softmax over the chosen ones, a softmax over all, or sigmoids."""

    SOFTMAX_AFTER = "softmax_after"
    SOFTMAX_BEFORE = "softmax_before"
    SIGMOID = "sigmoid"


def gate_reference(logits: Tensor, chosen: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
    """(weights [n, k], probabilities [n, E]) of logits [n, E] and the experts chosen [n, k]."""
    if gating is not Gating.SIGMOID:
        probabilities = logits.softmax(1)
        if gating is Gating.SOFTMAX_BEFORE:
            return probabilities.gather(1, chosen), probabilities
        return logits.gather(1, chosen).softmax(1), probabilities
    scores = logits.sigmoid()
    probabilities = scores / (scores.sum(1, keepdim=True) + _TINY)
    weights = scores.gather(1, chosen)
    if chosen.shape[1] > 1:
        weights = weights / (weights.sum(1, keepdim=True) + _TINY)
    return weights, probabilities
