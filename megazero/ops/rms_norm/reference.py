"""RMSNorm as its formula reads (Zhang & Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import compute_dtype


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim."""
    wide = x.to(compute_dtype(x.dtype))
    mean_square = wide.square().mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps) * weight).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of t = x + residual, and t, rounded to x's dtype first."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total
