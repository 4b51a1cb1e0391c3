"""The rotation frequency of each pair of a head's channels, and ways to scale it for longer contexts.

A model trained on short sequences can be extended to longer ones by slowing down the channels of which it has
not seen a full turn.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class RotaryScaling(ABC):
    """A way to change the frequencies of `rotary_frequencies`.

    Attributes:
        magnitude: what cosines and sines are multiplied by, so that scores grow by its square.
    """

    magnitude: float

    @abstractmethod
    def scaled(self, frequencies: Tensor, base: float) -> Tensor:
        """Scale the frequencies for a base: [dim/2], radians per position."""


@dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """All channels turn `factor` times more slowly (position interpolation, Chen et al. 2023)."""

    factor: float = 1.0
    magnitude: float = 1.0

    def scaled(self, frequencies: Tensor, base: float) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """Slows down low-frequency channels (Llama 3.1, Dubey et al. 2024).

    Attributes:
        factor: by how much.
        low, high: channels with fewer than `low` turns in the original length are slowed down, those with
            more than `high` are not, and those between in proportion.
        original: the length of the first training, in tokens.
    """

    factor: float
    low: float
    high: float
    original: int
    magnitude: float = 1.0

    def scaled(self, frequencies: Tensor, base: float) -> Tensor:
        turns = self.original / (2 * math.pi / frequencies)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """Slows down low-frequency channels, and sharpens attention (YaRN, Peng et al. 2023).

    Attributes:
        factor: by how much.
        original: the length of the first training, in tokens.
        fast, slow: turns in that length; channels beyond `fast` stay as they are, those below `slow` are
            slowed down by the whole factor.
        whole_channels: whether the two limits are rounded to whole channels.
        magnitude: see `RotaryScaling`.
    """

    factor: float
    original: int
    fast: float
    slow: float
    whole_channels: bool
    magnitude: float

    def scaled(self, frequencies: Tensor, base: float) -> Tensor:
        dim = 2 * frequencies.numel()
        first, last = (self._channel(turns, dim, base) for turns in (self.fast, self.slow))
        if self.whole_channels:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        channels = torch.arange(dim // 2, dtype=frequencies.dtype, device=frequencies.device)
        slowed = ((channels - first) / ((last - first) or 0.001)).clamp(0, 1)
        return frequencies / self.factor * slowed + frequencies * (1 - slowed)

    def _channel(self, turns: float, dim: int, base: float) -> float:
        """The (fractional) number of the channel that makes `turns` turns in the original length."""
        return dim * math.log(self.original / (2 * math.pi * turns)) / (2 * math.log(base))


UNSCALED = LinearScaling()


def yarn_magnitude(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """YaRN's magnitude: (0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1)."""
    return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)


def rotary_frequencies(
    dim: int, base: float, dtype: torch.dtype, device: torch.device, scaling: RotaryScaling = UNSCALED
) -> Tensor:
    """base^(-2 i / dim) as `scaling` changes it: [dim/2], radians per position."""
    exponents = torch.arange(0, dim, 2, dtype=dtype, device=device) / dim
    frequencies = 1.0 / base**exponents
    return frequencies if scaling == UNSCALED else scaling.scaled(frequencies, base)
