"""The angles of rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(
    positions: Tensor, dim: int, base: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2 i / dim), each [s, 1, 1, dim/2] or [s, b, 1, dim/2].

    positions: int64 [s], or [s, b] where samples differ. dim: how many channels of a head rotate,
    even. Angles are taken in fp32, as checkpoints in this field were trained. Raises ValueError for
    an odd dim or positions of another rank.
    """
    if dim % 2:
        raise ValueError(f"`dim` must be even, but is {dim}; rotary channels turn in pairs.")
    if positions.dim() not in (1, 2):
        raise ValueError(
            f"`positions` must be [s] or [s, b], but has shape {tuple(positions.shape)}; "
            "give one position per token."
        )
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    inverse_frequencies = 1.0 / base**exponents
    columns = positions.view(positions.shape[0], -1, 1, 1)
    angles = columns.to(torch.float32) * inverse_frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)
