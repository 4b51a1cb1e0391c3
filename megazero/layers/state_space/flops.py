"""Floating-point operations of a Mamba-2 mixer for one token, forward only."""

from __future__ import annotations

from megazero.config.tree.model import ModelConfig


def mamba_flops(model: ModelConfig) -> float:
    """FLOPs of one mixer, as Megatron-LM counts them.

    With w channels in n heads, g groups and states of size z: 2 h (2 w + 2 g z + n) and 2 w h for the
    projections, and 7 w z for the scan.
    """
    width = model.mamba_width
    return 2 * model.hidden_size * (model.mamba_rows + width) + 7 * width * model.mamba_state_dim
