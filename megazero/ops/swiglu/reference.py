"""SwiGLU as its formula reads (Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import compute_dtype


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up for gate_up [..., 2, f]."""
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).unbind(-2)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
