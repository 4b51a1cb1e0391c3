"""Softmax of scaled, masked attention scores."""

from megazero.ops.scaled_softmax.front import SCALED_SOFTMAX, scaled_softmax

__all__ = ["SCALED_SOFTMAX", "scaled_softmax"]
