"""The positions of rows in their sequences, which dropout masks and rotary angles are functions of."""

from __future__ import annotations

import torch
from torch import Tensor

# A range if the rows are evenly spaced, otherwise int64 [s], or [s, b] if samples differ.
Positions = range | Tensor


def position_tensor(positions: Positions, device: torch.device) -> Tensor:
    """int64 [s] or [s, b] on `device`; a range becomes a tensor made there."""
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step, device=device)
    return positions


def check_positions(positions: Positions, rows: int, b: int, name: str) -> None:
    """Raise ValueError unless there is a position for each of `rows` rows of `b` sequences."""
    shape = (len(positions),) if isinstance(positions, range) else tuple(positions.shape)
    if shape not in ((rows,), (rows, b)):
        raise ValueError(
            f"`{name}` must be [{rows}] or [{rows}, {b}], but has shape {list(shape)}; "
            "give one position per row."
        )
