"""The pieces of gradient clipping that need no communication: a sum of squares and a coefficient.

The caller adds up the sums over the ranks that hold different elements, each element once, and takes
the root; `ParamSpec` says which elements those are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megazero.errors import NumericsError
from megazero.ops.segments import DeviceSignals
from megazero.ops.square_sum import square_sum

# Added to the norm before dividing, as torch's and Megatron's clipping do.
_NORM_EPS = 1e-6


def local_square_sum(tensors: Iterable[Tensor], device: torch.device | str = "cpu") -> Tensor:
    """Sum of the squares of all elements, in fp64.

    It is non-finite only if an element is inf or NaN; on a GPU without our kernels, where checking would
    stall, also if a tensor's norm is above 1.8 x 10^19.

    Args:
        tensors: floating-point tensors of any shape and dtype, on one device. An iterator may overwrite a
            tensor once the next is asked for; the tensors of a sequence are measured together.
        device: the device of the zero that an empty iterable gives; otherwise the tensors' device is used.

    Returns:
        fp64 scalar tensor `[]` on the tensors' device; nothing is copied to the host.
    """
    total = None
    for together in [tensors] if isinstance(tensors, Sequence) and tensors else ([x] for x in tensors):
        part = square_sum(together)
        total = part if total is None else total + part
    return torch.zeros((), dtype=torch.float64, device=device) if total is None else total


def clipped_on_device(norm: Tensor, max_norm: float, grad_scale: float) -> DeviceSignals:
    """The factor of gradients `grad_scale` with the `clip_coefficient` of a norm that only the device knows.

    Args:
        norm: fp64 [], of the gradients after `grad_scale`. Where it is inf or NaN, the step is skipped.
        max_norm: the largest norm; 0 turns clipping off.
        grad_scale: a factor of the gradients.

    Returns:
        The same bits as those of a factor that the host computes.
    """
    clip = torch.ones_like(norm) if max_norm == 0.0 else (max_norm / (norm + _NORM_EPS)).clamp(max=1.0)
    return DeviceSignals((clip * grad_scale).float(), (~norm.isfinite()).float())


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
