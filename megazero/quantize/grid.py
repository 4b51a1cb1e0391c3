"""`Grid`: the numbers that a quantized weight can be, which are those of compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.formats.hf.packed import QuantizedWeight


@dataclass(frozen=True)
class Grid:
    """Symmetric integers: code c and the scale s of its group are the number c s.

    A group's scale is its largest magnitude / ((2^bits - 1) / 2): the code of a largest number that is
    positive is cut by half a step. A group of zeros has the scale 1.

    Attributes:
        bits: bits of a code.
        group: the neighbours in a row that share a scale; None for the whole row.
        dtype: the dtype of scales, to which they are rounded before codes are chosen.
    """

    bits: int
    group: int | None
    dtype: torch.dtype = torch.float32

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest code."""
        return -(1 << self.bits - 1), (1 << self.bits - 1) - 1

    def scales(self, weight: Tensor, share: float = 1.0) -> Tensor:
        """Scales, float64 [rows, groups], of a weight [rows, n]; a share of the largest magnitude is kept."""
        most = weight.double().unflatten(1, (-1, self.group or weight.shape[1])).abs().amax(2)
        return self.rounded(most * share / ((2**self.bits - 1) / 2))

    def rounded(self, scales: Tensor) -> Tensor:
        """Scales, float64, that are numbers of `dtype`; one that would be 0 is 1."""
        scales = scales.to(self.dtype).double()
        return torch.where(scales == 0, torch.ones_like(scales), scales)

    def codes(self, weight: Tensor, scales: Tensor) -> Tensor:
        """The nearest codes of weights [..., k] under their scales, which broadcast; float64."""
        return (weight.double() / scales).round().clamp(*self.bounds)

    def quantized(self, weight: Tensor, scales: Tensor) -> QuantizedWeight:
        """The nearest codes of a weight [rows, n], given the scales of its groups."""
        codes = self.codes(weight.unflatten(1, (scales.shape[1], -1)), scales.unsqueeze(2)).flatten(1)
        return QuantizedWeight(codes.to(torch.int8), scales.to(self.dtype), self.bits)


def rounded_inputs(x: Tensor) -> Tensor:
    """Inputs [..., n] rounded to 8 bits with a scale for each token, as W8A8 rounds them where it is used."""
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (x / scale).round().clamp(-128, 127) * scale
