"""Pieces of a sequence on the ranks that share it."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.errors import ConfigError
from megazero.layers.collectives import gather_rows
from megazero.mpu.group import Group


def check_pieces(x: Tensor, group: Group) -> None:
    """Hold the shape of a piece ``[s/p, b, ...]`` against the other ranks'; each of them calls this.

    Raises:
        ConfigError: rows or samples differ, of which an exchange would make nonsense, or never end.
    """
    if group.size == 1:
        return
    shapes = gather_rows(torch.tensor([x.shape[:2]], device=x.device), group).tolist()
    for what, sizes in zip(("rows", "samples"), zip(*shapes, strict=True), strict=True):
        if len(set(sizes)) > 1:
            raise ConfigError(
                f"`query` must have equally many {what} on the {group.size} ranks that share a sequence, but "
                f"has {', '.join(map(str, sizes))}; pad sequences to a multiple of {group.size}, and give "
                "these ranks pieces of the same samples"
            )
