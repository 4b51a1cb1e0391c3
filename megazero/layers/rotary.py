"""The rotary table of a model: cosines and sines by which its layers turn queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.config.tree.model import ModelConfig
from megazero.layers.rows import Spread
from megazero.ops.rotary import rotary_table
from megazero.ops.rotary_frequencies import (
    UNSCALED,
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    YarnScaling,
    yarn_magnitude,
)

MOST_POSITIONS_IN_FP32 = 131_072
"""Models of more positions compute angles in fp64. Published weights of fewer know the error of fp32."""


def rotary_scaling(config: ModelConfig) -> RotaryScaling:
    """How a model slows its channels down."""
    if config.scales_by_yarn:
        factor = config.rotary_scaling_factor
        return YarnScaling(
            factor,
            config.yarn_original_max_position_embeddings,
            config.yarn_beta_fast,
            config.yarn_beta_slow,
            config.yarn_correction_range_round_to_int,
            yarn_magnitude(factor, config.mscale, config.mscale_all_dim),
        )
    if config.use_rope_scaling:
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        return Llama3Scaling(
            config.rope_scaling_factor, low, high, config.rope_original_max_position_embeddings
        )
    divisor = config.rotary_seq_len_interpolation_factor
    return UNSCALED if divisor is None else LinearScaling(divisor)


def rotary_of(config: ModelConfig, positions: Tensor) -> tuple[Tensor, ...] | None:
    """cos and sin of the angles at `positions`, int64 [s] or [s, b]; None if the model rotates nothing.

    Where layers with a window have a base of their own, their cos and sin follow.
    """
    if not config.rotates:
        return None
    kinds = [(config.rotary_base, rotary_scaling(config))]
    if config.window_rotary_base is not None:
        kinds.append((config.window_rotary_base, UNSCALED))
    exact = config.positions > MOST_POSITIONS_IN_FP32
    tables = (
        rotary_table(positions, config.rotary_dim, base, scaling=scaling, exact=exact)
        for base, scaling in kinds
    )
    return tuple(table for pair in tables for table in pair)


def halves(x: Tensor, rotated: int) -> Tensor:
    """The first `rotated` channels in pairs of neighbours -> all first ones, then all second ones."""
    pairs = (x[..., :rotated:2], x[..., 1:rotated:2])
    return torch.cat(pairs if rotated == x.shape[-1] else (*pairs, x[..., rotated:]), -1)


def rotary_tables_at(config: ModelConfig, layer: int) -> slice:
    """The place of a layer's cos and sin in what `rotary_of` gives; empty if the layer rotates nothing."""
    if not config.rotates_at(layer):
        return slice(0, 0)
    own = config.window_rotary_base is not None and config.window_at(layer) is not None
    return slice(2, 4) if own else slice(0, 2)


@dataclass(frozen=True)
class RotaryOfColumns:
    """Makes the tables of this rank's columns.

    Attributes:
        config: the model.
        positions: int64 [s] or [s, b], those of all columns.
        spread: how columns lie on ranks.
    """

    config: ModelConfig
    positions: Tensor
    spread: Spread

    def __call__(self, columns: Tensor | None = None) -> tuple[Tensor, ...] | None:
        """cos and sin, None if the model rotates nothing.

        Args:
            columns: int64 [r, b], the columns of whole sequences that are left; None for all.
        """
        positions = self.positions
        if columns is not None:
            positions = positions[columns] if positions.dim() == 1 else positions.gather(0, columns)
        return rotary_of(self.config, self.spread.own_columns(positions))
