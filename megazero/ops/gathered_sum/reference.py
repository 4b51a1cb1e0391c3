"""The gathered sum as its formula reads."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megazero.ops.chunks import compute_dtype


def gathered_sum_reference(
    rows: Tensor, slots: Tensor, choice: Tensor, weights: Tensor | None, whole: bool
) -> Tensor:
    """out[i] = sum over j of weights[i, j] rows[slots[i, j]], where row m is zeros."""
    wide = compute_dtype(rows.dtype)
    terms = F.pad(rows.to(wide), (0, 0, 0, 1))[slots]  # [n, k, h]
    if weights is not None:
        terms = terms * weights.to(wide).unsqueeze(2)
    return terms.sum(1).to(rows.dtype)
