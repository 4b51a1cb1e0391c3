"""The sum of squares as its formula reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


def square_sum_reference(tensors: Sequence[Tensor]) -> Tensor:
    """``sum(x^2)`` over all elements of all tensors, in fp64."""
    return reduce(torch.add, (tensor.double().square().sum() for tensor in tensors))
