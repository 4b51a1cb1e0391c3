"""Squared ReLU, max(x, 0)^2 (So et al. 2021, Primer)."""

from megazero.ops.squared_relu.front import SQUARED_RELU, squared_relu

__all__ = ["SQUARED_RELU", "squared_relu"]
