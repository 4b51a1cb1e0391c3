"""Bias, dropout and residual as their formula reads (Srivastava et al. 2014, inverted scaling)."""

from __future__ import annotations

from torch import Tensor

from megazero.ops.chunks import compute_dtype
from megazero.ops.dropout import Dropout, dropout_mask_hidden


def bias_dropout_add_reference(
    x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None
) -> Tensor:
    """residual + mask * (x + bias) / (1 - p)."""
    wide = x.to(compute_dtype(x.dtype))
    if bias is not None:
        wide = wide + bias
    if dropout is not None:
        wide = wide * dropout_mask_hidden(dropout, *x.shape) / (1 - dropout.p)
    return (residual + wide).to(residual.dtype)
