"""Rounding to the nearest code, and groups whose largest magnitudes are cut off."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.formats.hf.packed import QuantizedWeight
from megazero.quantize.grid import Grid

_SHARES = tuple(1 - step / 20 for step in range(10))


def nearest(weight: Tensor, grid: Grid) -> QuantizedWeight:
    """Round a weight [rows, n] to the nearest codes."""
    return grid.quantized(weight, grid.scales(weight))


def clipped(weight: Tensor, gram: Tensor, grid: Grid) -> QuantizedWeight:
    """Round a weight [rows, n], cutting off the largest magnitudes of each group where outputs gain.

    Of ten shares, from 1 down to 0.55, a group keeps the one with the least squared error of its part of the
    outputs (Lin et al. 2023, AWQ).

    Args:
        weight: float64.
        gram: sum of the products of inputs, float64 [n, n].
        grid: the codes.
    """
    group = grid.group or weight.shape[1]
    blocks = torch.stack([gram[i : i + group, i : i + group] for i in range(0, weight.shape[1], group)])
    best, least = grid.scales(weight), torch.full((), torch.inf, dtype=torch.float64, device=weight.device)
    for share in _SHARES:
        scales = grid.scales(weight, share)
        wrong = (grid.quantized(weight, scales).dequantized().double() - weight).unflatten(1, (-1, group))
        by_group = wrong.transpose(0, 1)  # [groups, rows, group]
        error = ((by_group @ blocks) * by_group).sum(2).t()
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return grid.quantized(weight, best)


def squared_error(wrong: Tensor, gram: Tensor) -> float:
    """The sum over tokens of the squared outputs of a weight [rows, n], given its inputs' products [n, n]."""
    return float(((wrong @ gram) * wrong).sum())
