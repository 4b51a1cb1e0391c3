"""Projection to the vocabulary and cross-entropy in one, so that the logits are never whole."""

from megazero.ops.linear_cross_entropy.front import LINEAR_CROSS_ENTROPY, linear_cross_entropy

__all__ = ["LINEAR_CROSS_ENTROPY", "linear_cross_entropy"]
