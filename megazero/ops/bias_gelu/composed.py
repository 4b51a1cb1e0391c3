"""GELU of x + bias by torch's own operators."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bias_gelu_torch(x: Tensor, bias: Tensor | None, exact: bool = False) -> Tensor:
    """gelu(x + bias) in two passes."""
    z = x if bias is None else x + bias
    return F.gelu(z, approximate="none" if exact else "tanh")
