"""Fake quantization: numbers rounded to those that few bits can say, with straight-through gradients.

Symmetric and asymmetric rounding as in ZeroQuant (Yao et al. 2022), ternary weights as in Li et al. 2016,
binary ones as in Rastegari et al. 2016; the gradient of the rounding is taken to be 1 (Bengio et al. 2013).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    """The value of `rounded` with the gradient of `exact`; both have one shape."""
    result: Tensor = _StraightThrough.apply(exact, rounded)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def quantized(x: Tensor, bits: int, *, symmetric: bool = True, stochastic: bool = False) -> Tensor:
    """Round each row to at most 2^bits values of its own.

    Args:
        x: [groups, n].
        bits: 1 gives the sign times the mean magnitude; 2 gives -a, 0 and a, where magnitudes up to 0.7 of
            the mean become 0 and a is the mean of the others; more are evenly spaced.
        symmetric: whether the values are spaced around 0, or between a row's least and largest.
        stochastic: round up with the probability of the remainder.

    Returns:
        [groups, n]; a row of zeros stays one.
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
    """Round to multiples of `scale`: 2^bits of them around 0, or from `low` on; where it is 0, to `low`.

    Shapes broadcast.
    """
    step = torch.where(scale == 0, torch.ones_like(scale), scale)
    shift = torch.zeros_like(step) if low is None else (low / step).round() * step
    codes = (x - shift) / step
    codes = (codes + torch.rand_like(codes)).floor() if stochastic else codes.round()
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if low is None else (0, 2**bits - 1)
    return codes.clamp(least, most) * step + shift


def bits_at(step: int, start: int, target: int, period: int) -> int:
    """The bits of weights some optimizer steps after the start: one fewer each period, which doubles."""
    bits = start
    while bits > target and step >= period:
        period, bits = max(1, 2 * period), bits - 1
    return bits


@dataclass(frozen=True)
class WeightQuantizer:
    """How a layer's weight is rounded.

    Attributes:
        start_bits, target_bits, period: see `bits_at`.
        groups: equal pieces of the weight, each rounded by itself.
        symmetric, stochastic: see `quantized`.
        change_ratio: by how much the share of the exact weight shrinks with each step; None mixes nothing in.
    """

    start_bits: int
    target_bits: int
    period: int
    groups: int
    symmetric: bool
    stochastic: bool
    change_ratio: float | None = None

    def __call__(self, weight: Tensor, step: int) -> Tensor:
        """The weight of any shape as it is this many steps after the start; gradients go straight through."""
        bits = bits_at(step, self.start_bits, self.target_bits, self.period)
        if bits >= 16:
            return weight
        rows = weight.detach().reshape(self.groups, -1)
        rounded = quantized(rows, bits, symmetric=self.symmetric, stochastic=self.stochastic)
        rounded = rounded.view_as(weight).to(weight.dtype)
        if self.change_ratio is not None:
            exact = max(0.0, 1.0 - step * self.change_ratio)
            rounded = exact * weight.detach() + (1 - exact) * rounded
        return straight_through(weight, rounded)


class ActivationQuantizer(nn.Module):
    """Rounds a layer's inputs, each token or image by itself, or by a running range.

    Args:
        bits: see `quantized`.
        symmetric: likewise.
        static: keep a running range, which changes in training alone, by a twentieth with each call.
    """

    running: Tensor

    def __init__(self, bits: int, *, symmetric: bool, static: bool):
        super().__init__()
        self.bits, self.symmetric, self.static = bits, symmetric, static
        self.register_buffer("running", torch.zeros(2) if static else None)

    def forward(self, x: Tensor, first_dim: int = -1) -> Tensor:
        """Round `x` of any shape; without a running range, all dims from `first_dim` on share one."""
        if self.static:
            rounded = self._by_running_range(x.detach())
        else:
            rows = x.detach().flatten(first_dim).flatten(0, -2) if x.dim() > 1 else x.detach()[None]
            rounded = quantized(rows, self.bits, symmetric=self.symmetric).view_as(x)
        return straight_through(x, rounded.to(x.dtype))

    def _by_running_range(self, x: Tensor) -> Tensor:
        if self.training:
            now = torch.stack([x.min(), x.max()]).float()
            unknown = not self.running.any()
            self.running.copy_(now if unknown else torch.lerp(now, self.running, 0.95))
        low, high = self.running
        if self.symmetric:
            return spaced(x, 2 * self.running.abs().max() / 2**self.bits, None, self.bits)
        return spaced(x, (high - low) / 2**self.bits, low, self.bits)
