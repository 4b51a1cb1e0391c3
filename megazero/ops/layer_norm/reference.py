"""Layer normalization as its formula reads (Ba, Kiros & Hinton 2016)."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import compute_dtype


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dim; the biased variance."""
    wide = x.to(compute_dtype(x.dtype))
    centered = wide - wide.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    return (centered * torch.rsqrt(variance + eps) * weight + bias).to(x.dtype)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Layer norm of t = x + residual, and t, rounded to x's dtype first."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps), total
