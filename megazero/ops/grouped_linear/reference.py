"""Grouped products in plain torch: one matrix product after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def grouped_linear_reference(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Row r of group e is x[r] weight[e].T, [R, n]."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    for rows, out, matrix in zip(x.split(list(sizes)), y.split(list(sizes)), weight, strict=True):
        torch.mm(rows, matrix.t(), out=out)
    return y


def grouped_outer_reference(grad: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Matrix e is grad_e.T x_e over the rows of group e, [E, n, K]; zeros for an empty group."""
    outer = x.new_empty(len(sizes), grad.shape[1], x.shape[1])
    for left, right, out in zip(grad.split(list(sizes)), x.split(list(sizes)), outer, strict=True):
        torch.mm(left.t(), right, out=out)
    return outer
