"""The choice of rows as its formula reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def chosen_rows_reference(
    source: Tensor, numbers: Tensor, inverse: Tensor, otherwise: Tensor | None
) -> Tensor:
    """out[i] = source[numbers[i]], or otherwise[i] where numbers[i] is negative."""
    rows = F.pad(source, (0, 0, 0, 1))[numbers]  # the last row, number -1, is zeros
    return rows if otherwise is None else torch.where((numbers < 0).unsqueeze(1), otherwise, rows)
