"""Floating-point operations of a Mamba-2 mixer for one token, forward only."""

from __future__ import annotations

from megazero.config.tree.hybrid import HybridConfig


def mamba_flops(model: HybridConfig) -> float:
    """FLOPs of one mixer, as Megatron-LM counts them.

    With d = heads x head width, groups g, heads n and a state of size z: 2 h (2 d + 2 g z + n) and 2 d h for
    the projections, and 7 d z for the scan.
    """
    heads, state = model.mamba_heads, model.mamba_state_dim
    assert heads is not None, "the pattern has such a layer"
    inner = heads * model.mamba_head_dim
    projected = 2 * inner + 2 * model.mamba_num_groups * state + heads
    return 2 * model.hidden_size * (projected + inner) + 7 * inner * state
