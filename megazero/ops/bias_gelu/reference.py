"""GELU of x + bias as its formulas read (Hendrycks & Gimpel 2016)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megazero.ops.chunks import compute_dtype


def bias_gelu_reference(x: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
    """z/2 (1 + erf(z / sqrt 2)) if exact, else z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3)))."""
    z = x if bias is None else x + bias
    wide = z.to(compute_dtype(z.dtype))
    if exact:
        gate = torch.erf(wide / math.sqrt(2))
    else:
        gate = torch.tanh(math.sqrt(2 / math.pi) * wide * (1 + 0.044715 * wide.square()))
    return (wide / 2 * (1 + gate)).to(z.dtype)
