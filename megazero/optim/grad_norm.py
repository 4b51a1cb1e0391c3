"""The pieces of gradient clipping that need no communication: a sum of squares and a coefficient.

The caller adds up the sums over the ranks that hold different elements, each element once, and takes
the root; `ParamSpec` says which elements those are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megazero.errors import NumericsError

# Elements per partial sum on CPU: few enough for an fp32 sum to be accurate to 1e-7, and for an fp64 copy to
# stay in the second-level cache.
_BLOCK = 1 << 16
# Added to the norm before dividing, as torch's and Megatron's clipping do.
_NORM_EPS = 1e-6


def local_square_sum(tensors: Iterable[Tensor], device: torch.device | str = "cpu") -> Tensor:
    """Sum of the squares of all elements, in fp64.

    Neither fp16's range (any gradient above 256 squares to inf) nor the length of a flat tensor (one
    fp32 sum of 2.3 x 10^7 terms was off by 0.3%) spoils it: partial sums are short and are added in fp64, and
    if a square leaves fp32's range they are computed again in fp64. So on CPU the result is non-finite only
    if an element is inf or NaN; on a GPU, where checking would stall, also for a tensor whose norm is above
    1.8 x 10^19.

    Args:
        tensors: floating-point tensors of any shape and dtype, on one device.
        device: the device of the zero that an empty iterable gives; otherwise the tensors' device is used.

    Returns:
        fp64 scalar tensor `[]` on the tensors' device; nothing is copied to the host.
    """
    total = None
    for tensor in tensors:
        part = _square_sum(tensor.detach())
        total = part if total is None else total + part
    return torch.zeros((), dtype=torch.float64, device=device) if total is None else total


def _square_sum(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        # A GPU sums as a tree, which keeps fp32 accurate enough, and widens fp16 and bf16 while reading.
        # Asking for fp64 would first make an fp64 copy.
        wide = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
        return torch.linalg.vector_norm(tensor, dtype=wide).double().square()
    blocks = tensor.reshape(-1).split(_BLOCK)
    if tensor.dtype == torch.float32:
        # Twice as fast as in fp64: 7 against 14 ms for 2.3 x 10^7 elements on one core.
        total = _dot_sum(blocks)
        if torch.isfinite(total):
            return total
    return _dot_sum(block.double() for block in blocks)


def _dot_sum(blocks: Iterable[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for block in blocks:
        total += torch.dot(block, block)
    return total


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor to multiply the gradients by so that their norm is at most `max_norm`.

    It is 1.0 if the norm is already below `max_norm`, or if `max_norm` is 0 (clipping off).

    Raises:
        NumericsError: the norm is inf or NaN; such a step must be skipped, not clipped.
    """
    if not math.isfinite(norm):
        raise NumericsError(f"The gradient norm must be finite to clip by it, but is {norm}; skip the step.")
    if max_norm == 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + _NORM_EPS))
