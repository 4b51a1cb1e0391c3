"""The limits of torch.compile where shapes are constants."""

from __future__ import annotations

import torch

_MOST_SHAPES = 1024


def compiles_every_length() -> None:
    """Let torch compile a function for up to a thousand shapes; by default it stops compiling after eight."""
    limits = torch._dynamo.config
    limits.recompile_limit = limits.accumulated_recompile_limit = _MOST_SHAPES
