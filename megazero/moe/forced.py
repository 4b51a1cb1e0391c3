"""Random numbers in the place of a router's logits, for benchmarks, as Megatron-LM's."""

from __future__ import annotations

import torch
from torch import Tensor


def forced(logits: Tensor, uniform: Tensor) -> Tensor:
    """Normal random numbers that have the gradient of the logits: float32 [n, E].

    Args:
        logits: float32 [n, E].
        uniform: uniform random numbers in [0, 1), multiples of 2^-24, float32 [n, E].
    """
    # The middle of each step of 2^-24, so never 0; that of the last one would be rounded to 1.
    inner = (uniform + 2.0**-25).clamp_max(1 - 2.0**-24)
    return 2**0.5 * torch.erfinv(2 * inner - 1) + (logits - logits.detach())
