"""Fake quantization: values rounded to those of few bits, with straight-through gradients.

Symmetric and asymmetric rounding is that of ZeroQuant (Yao et al. 2022), ternary weights are those of Li et
al. 2016, and binary ones those of Rastegari et al. 2016. The rounding has gradient 1 (Bengio et al. 2013).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return the value of `rounded` with the gradient of `exact`, which has the same shape."""
    result: Tensor = _StraightThrough.apply(exact, rounded)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def quantized(x: Tensor, bits: int, *, symmetric: bool = True, stochastic: bool = False) -> Tensor:
    """Round each row of x to at most 2^bits values.

    Args:
        x: [groups, n].
        bits: 1 gives the sign times the mean magnitude; 2 gives -a, 0 and a: magnitudes up to 0.7 of the mean
            become 0, and a is the mean of the others; more bits give evenly spaced values.
        symmetric: whether the values are spaced around 0; otherwise from the row's minimum to its maximum.
        stochastic: whether to round up with the probability of the remainder.

    Returns:
        [groups, n]; a row of equal numbers stays as it is.
    """
    if bits == 1:
        return x.sign() * x.abs().mean(1, keepdim=True)
    if bits == 2:
        kept = x.abs() > 0.7 * x.abs().mean(1, keepdim=True)
        count = kept.sum(1, keepdim=True).clamp(min=1)
        return x.sign() * kept * ((x.abs() * kept).sum(1, keepdim=True) / count)
    if symmetric:
        return spaced(x, 2 * x.abs().amax(1, keepdim=True) / 2**bits, None, bits, stochastic)
    low = x.amin(1, keepdim=True)
    return spaced(x, (x.amax(1, keepdim=True) - low) / 2**bits, low, bits, stochastic)


@torch.no_grad()
def spaced(x: Tensor, scale: Tensor, low: Tensor | None, bits: int, stochastic: bool = False) -> Tensor:
    """Round x to 2^bits multiples of `scale`, around 0 or from `low` upwards; with a scale of 0, x stays.

    `scale` and `low` broadcast with x. As in DeepSpeed, a largest number around 0 is cut by a step.
    """
    step = torch.where(scale == 0, torch.ones_like(scale), scale)
    shift = torch.zeros_like(step) if low is None else (low / step).round() * step
    codes = (x - shift) / step
    codes = (codes + torch.rand_like(codes)).floor() if stochastic else codes.round()
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if low is None else (0, 2**bits - 1)
    return torch.where(scale == 0, x, codes.clamp(least, most) * step + shift)


def bits_at(step: int, start: int, target: int, period: int) -> tuple[int, int]:
    """Return the bits after `step` steps, and the step at which they became so few.

    They are one fewer after each period, whose length then doubles.
    """
    bits, since = start, 0
    while bits > target and step >= period:
        period, bits, since = max(1, 2 * period), bits - 1, period
    return bits, since


@dataclass(frozen=True)
class WeightQuantizer:
    """Quantizes a layer's weight.

    Attributes:
        start_bits, target_bits, period: see `bits_at`.
        groups: the number of equal pieces of the weight, each quantized by itself.
        symmetric, stochastic: see `quantized`.
        change_ratio: the decrease per step of the exact weight's share, which is mixed in and is 1 again
            after each fall of the bits; None mixes nothing.
    """

    start_bits: int
    target_bits: int
    period: int
    groups: int
    symmetric: bool
    stochastic: bool
    change_ratio: float | None = None

    def __call__(self, weight: Tensor, step: int) -> Tensor:
        """Quantize a weight of any shape, `step` steps after the start; gradients pass straight through."""
        bits, since = bits_at(step, self.start_bits, self.target_bits, self.period)
        if bits >= 16:
            return weight
        rows = weight.detach().reshape(self.groups, -1)
        rounded = quantized(rows, bits, symmetric=self.symmetric, stochastic=self.stochastic)
        rounded = rounded.view_as(weight).to(weight.dtype)
        if self.change_ratio is not None:
            exact = max(0.0, 1.0 - (step - since) * self.change_ratio)
            rounded = exact * weight.detach() + (1 - exact) * rounded
        return straight_through(weight, rounded)


class ActivationQuantizer(nn.Module):
    """Quantizes a layer's inputs, by the range of each token or image or by a running range.

    Args:
        bits, symmetric: see `quantized`.
        static: whether to use a running range, an exponential average with decay 0.95 over training calls.
    """

    running: Tensor

    def __init__(self, bits: int, *, symmetric: bool, static: bool):
        super().__init__()
        self.bits, self.symmetric, self.static = bits, symmetric, static
        self.register_buffer("running", torch.zeros(2) if static else None)

    def forward(self, x: Tensor, first_dim: int = -1) -> Tensor:
        """Quantize x of any shape; without a running range, the dims from `first_dim` on share a range."""
        if self.static:
            rounded = self._by_running_range(x.detach())
        else:
            rows = x.detach().flatten(first_dim).flatten(0, -2) if x.dim() > 1 else x.detach()[None]
            rounded = quantized(rows, self.bits, symmetric=self.symmetric).view_as(x)
        return straight_through(x, rounded.to(x.dtype))

    def _by_running_range(self, x: Tensor) -> Tensor:
        if self.training:
            now = torch.stack([x.min(), x.max()]).float()
            first = not self.running.any()
            self.running.copy_(now if first else torch.lerp(now, self.running, 0.95))
        low, high = self.running
        if self.symmetric:
            return spaced(x, 2 * self.running.abs().max() / 2**self.bits, None, self.bits)
        return spaced(x, (high - low) / 2**self.bits, low, self.bits)
