"""The short convolution of a Mamba-2 mixer: each channel by itself, over a row and those just before it."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 4
"""Rows that a result is made of, as in Megatron-LM."""


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The rows' results [s, b, g, c], and the last rows of the input, [WIDTH - 1, b, g, c], for what follows.

    Args:
        x: [s, b, g, c].
        weight: [g, c, WIDTH], the last one for the row itself.
        bias: [g, c].
        before: the rows before the first, [WIDTH - 1, b, g, c]; None for zeros.
        segments: int [b, s], ascending; a row sees none of another number. None: there is one.
    """
    if before is None:
        before = x.new_zeros(WIDTH - 1, *x.shape[1:])
    rows, s = torch.cat((before, x)), len(x)
    out = torch.addcmul(bias, x, weight[..., -1])
    for back in range(1, WIDTH):
        earlier = rows[WIDTH - 1 - back :][:s]
        if segments is not None:
            own = segments.t()
            numbers = torch.cat((own[:1].expand(min(back, s), -1), own))[:s]
            earlier = earlier * (own == numbers)[..., None, None]
        out = torch.addcmul(out, earlier, weight[..., -1 - back])
    return out, rows[s:]
