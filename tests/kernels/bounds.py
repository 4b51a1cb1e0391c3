"""Inputs and bounds that several sweeps share."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.harness import EPSILON, Bound


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers, one element into their storage: at an address that allows no packs."""
    held = tensor.new_empty(tensor.numel() + 1)
    held[1:] = tensor.flatten()
    return held[1:].view(tensor.shape)


def rounded_after(units: float, magnitude: Tensor, dtype: torch.dtype) -> Bound:
    """One rounding to dtype of what fp32 computed, `units` of fp32's spacing at `magnitude` off."""
    return Bound(2, magnitude * (units * EPSILON[torch.float32] / EPSILON[dtype] / 2))
