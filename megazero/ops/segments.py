"""Lists of flat tensors as the kernels of csrc/common/cuda_segments.hpp take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megazero.kernels.library import DTYPE_CODES

NO_WEIGHTS = -1  # as csrc/common/cuda_update.hpp has it


@dataclass(frozen=True)
class DeviceSignals:
    """Inputs of an optimizer's step that only the device knows, so that the host need not wait for them.

    Attributes:
        scale: fp32, one element: a further factor of the gradients, such as clipping's; None for 1.
        overflow: fp32, one element: unless it is 0, the step changes nothing; None for 0.
    """

    scale: Tensor | None = None
    overflow: Tensor | None = None


NO_SIGNALS = DeviceSignals()


def readable(tensor: Tensor) -> Tensor:
    """The tensor if a kernel can read it as it is, otherwise a contiguous copy, in fp32 if it is fp64."""
    return (tensor if tensor.dtype in DTYPE_CODES else tensor.float()).contiguous()


def lengths_of(first: Sequence[Tensor], *others: Sequence[Tensor | None] | None) -> list[int]:
    """The number of elements of each tensor; checks that the other lists have the same."""
    lengths = [tensor.numel() for tensor in first]
    for other in others:
        if other is not None:
            others_lengths = [n if x is None else x.numel() for x, n in zip(other, lengths, strict=True)]
            assert others_lengths == lengths, "other sizes"
    return lengths
