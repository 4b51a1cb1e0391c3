"""Squared ReLU as its formula reads (So et al. 2021)."""

from __future__ import annotations

from torch import Tensor


def squared_relu_reference(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    return x.clamp(min=0).square()
