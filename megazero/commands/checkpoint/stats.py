"""Statistics of a tensor's elements, and the distance between two tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.commands.checkpoint.stream import in_float64


@dataclass(frozen=True)
class Stats:
    """Statistics of a tensor's elements, in float64.

    Attributes:
        min, max, mean, rms: of the elements that are not NaN, or NaN if all are; rms is the root mean square.
        nan: the number of elements that are NaN.
    """

    min: float
    max: float
    mean: float
    rms: float
    nan: int


def stats_of(tensor: Tensor) -> Stats:
    """Compute the statistics of a tensor of any dtype that converts to float64."""
    low, high, total, squares, nan, count = math.inf, -math.inf, 0.0, 0.0, 0, 0
    for part in in_float64(tensor):
        numbers = part[~part.isnan()]
        nan += part.numel() - numbers.numel()
        if numbers.numel():
            count += numbers.numel()
            low, high = min(low, numbers.min().item()), max(high, numbers.max().item())
            total += numbers.sum().item()
            squares += numbers.square().sum().item()
    if not count:
        return Stats(math.nan, math.nan, math.nan, math.nan, nan)
    return Stats(low, high, total / count, math.sqrt(squares / count), nan)


@dataclass(frozen=True)
class Distance:
    """The distance between two tensors of one shape.

    Attributes:
        equal_bits: whether the tensors have the same dtype and the same bytes.
        largest: the largest difference of two elements; infinite if one of two elements is NaN.
        scale: the largest finite magnitude in either tensor.
    """

    equal_bits: bool
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        """The largest difference as a share of the largest magnitude."""
        return self.largest / self.scale if self.largest and self.scale else self.largest and math.inf


def distance(a: Tensor, b: Tensor) -> Distance:
    """Compare two tensors of one shape, on the CPU."""
    if a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)):
        return Distance(True, 0.0, 0.0)
    largest = scale = 0.0
    for x, y in zip(in_float64(a), in_float64(b), strict=True):
        same = (x == y) | (x.isnan() & y.isnan())
        apart = (x - y).abs().masked_fill(same, 0.0)
        apart.masked_fill_(apart.isnan(), math.inf)
        magnitude = torch.maximum(_finite(x), _finite(y))
        if apart.numel():
            largest, scale = max(largest, apart.max().item()), max(scale, magnitude.max().item())
    return Distance(False, largest, scale)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _finite(x: Tensor) -> Tensor:
    return x.abs().masked_fill(~x.isfinite(), 0.0)
