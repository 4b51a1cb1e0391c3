"""Rotary tables: the cosines and sines by which layers rotate queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.layers.rows import Spread
from megazero.ops.rotary import rotary_table
from megazero.ops.rotary_frequencies import (
    UNSCALED,
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
    yarn_magnitude,
)
from megazero.ops.rotary_frequencies import RotaryScaling as Slowed
from megazero.spec.parts import RotaryScaling, RotarySpec

MOST_POSITIONS_IN_FP32 = 131_072
"""Models of more positions compute angles in fp64. Published weights of fewer know the error of fp32."""


def rotary_scaling(spec: RotaryScaling | None) -> Slowed:
    """How a table's frequencies are scaled for longer contexts."""
    if spec is None:
        return UNSCALED
    match spec.kind:
        case "yarn":
            magnitude = yarn_magnitude(spec.factor, *spec.sharper)
            return YarnScaling(spec.factor, spec.original, spec.fast, spec.slow, spec.rounded, magnitude)
        case "llama3":
            return Llama3Scaling(spec.factor, spec.slow, spec.fast, spec.original)
        case _:
            return LinearScaling(spec.factor)


def rotary_of(specs: Sequence[RotarySpec], positions: Tensor) -> tuple[Tensor, ...] | None:
    """cos and sin of each table at `positions`, int64 [s] or [s, b]; None if the model rotates nothing."""
    tables = (
        rotary_table(
            positions,
            spec.channels,
            spec.base,
            scaling=rotary_scaling(spec.scaling),
            exact=spec.positions > MOST_POSITIONS_IN_FP32,
        )
        for spec in specs
    )
    return tuple(table for pair in tables for table in pair) or None


def halves(x: Tensor, rotated: int) -> Tensor:
    """Reorder the first `rotated` channels from pairs of neighbours to all first members, then all second
    ones.
    """
    pairs = (x[..., :rotated:2], x[..., 1:rotated:2])
    return torch.cat(pairs if rotated == x.shape[-1] else (*pairs, x[..., rotated:]), -1)


def rotary_tables_at(number: int | None) -> slice:
    """The slice of `rotary_of`'s result that holds a table's cos and sin; empty for None."""
    return slice(0, 0) if number is None else slice(2 * number, 2 * number + 2)


@dataclass(frozen=True)
class RotaryOfColumns:
    """Computes the tables of this rank's columns.

    Attributes:
        specs: the tables.
        positions: int64 [s] or [s, b], those of all columns.
        spread: how columns lie on ranks.
    """

    specs: Sequence[RotarySpec]
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
        return rotary_of(self.specs, self.spread.own_columns(positions))
