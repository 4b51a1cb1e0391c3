"""`Matrices`: how a parameter is made of matrices, for optimizers that look at whole ones (Muon, Shampoo)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Matrices:
    """The matrices in a parameter: each has the last dim as its columns and flattened dims before it as rows.

    Attributes:
        stacked: how many first dims number whole matrices: experts, or gate and value.
        parts: sizes along dim `dim` of the matrices that are joined there: queries, keys and values; empty if
            there is only one.
        dim: that dim.
    """

    stacked: int = 0
    parts: tuple[int, ...] = ()
    dim: int = 0

    def change(self, whole: Tensor, change: Callable[[Tensor], Tensor], *, split: bool = True) -> Tensor:
        """A tensor of which each matrix is what `change` makes of it.

        Args:
            whole: the parameter's shape, not cut along any dim but the stacked ones.
            change: [n, rows, columns] -> the same shape, matrix by matrix.
            split: whether joined matrices are changed apart, or as one that has all their rows.
        """
        result = torch.empty_like(whole)
        parts = [whole.shape[self.dim]] if not (split and self.parts) else list(self.parts)
        for matrices, place in zip(whole.split(parts, self.dim), result.split(parts, self.dim), strict=True):
            count, rows = (
                math.prod(matrices.shape[: self.stacked]),
                math.prod(matrices.shape[self.stacked : -1]),
            )
            changed = change(matrices.reshape(count, rows, matrices.shape[-1]))
            place.copy_(changed.view(matrices.shape))
        return result
