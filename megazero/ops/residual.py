"""The check of a residual by the operators that add it to x."""

from __future__ import annotations

from torch import Tensor


def check_residual(x: Tensor, residual: Tensor) -> None:
    """Raise ValueError unless the residual has x's shape and dtype."""
    if (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"`residual` must have the shape and dtype of `x`, {list(x.shape)} of {x.dtype}, but is "
            f"{list(residual.shape)} of {residual.dtype}; convert one of them first."
        )
