"""Floating-point operations of a Mamba-2 mixer for one token, forward only."""

from __future__ import annotations

from megazero.spec.parts import MixerSpec


def mamba_flops(spec: MixerSpec) -> float:
    """FLOPs of one mixer, as Megatron-LM counts them.

    With w channels in n heads, g groups and states of size z: 2 h (2 w + 2 g z + n) and 2 w h for the
    projections, and 7 w z for the scan.
    """
    return 2 * spec.stream.width * (spec.rows + spec.width) + 7 * spec.width * spec.state
