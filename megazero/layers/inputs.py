"""What a micro-batch brings to every layer besides the hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from megazero.layers.placement import Placement
from megazero.mpu import site_key
from megazero.ops.counter_random import derive
from megazero.ops.dropout import AttentionDropout, Dropout
from megazero.ops.positions import Positions

# What backward has left to do: each call adds one weight's gradient to its `grad` and returns the weight.
Deferred = list[Callable[[], nn.Parameter]]


class KeyValueStore(Protocol):
    """Keys and values of earlier positions, kept between generation steps."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [s, b, g, d] of `layer` and return all positions so far, [t, b, g, d]."""


@dataclass(frozen=True)
class LayerInputs:
    """Attributes:
    positions: the places of the hidden states' rows in their sequences: a range, or int64 [s], or [s, b]
        where samples differ. All s of them; under sequence parallelism a rank's own rows are its share.
    rotary: (cos, sin) tables of the same rows, or None with learned positions.
    document_ids: int [b, s]; positions attend only within equal ids. None: all earlier positions.
    sample_keys: int64 [b], the key of each sample's random streams; None turns dropout off.
    cache: earlier keys and values during generation.
    deferred: where backward leaves the gradients of the linear layers' weights, to be computed later (the
        weight half of a split backward, Qi et al. 2023); None: backward computes them.
    """

    positions: Positions
    rotary: tuple[Tensor, Tensor] | None = None
    document_ids: Tensor | None = None
    sample_keys: Tensor | None = None
    cache: KeyValueStore | None = None
    deferred: Deferred | None = None

    def dropout(self, p: float, placement: Placement, *site: str | int) -> Dropout | None:
        """The dropout of hidden states [s or s/tp, b, h] at `site` of the model."""
        if self.sample_keys is None or p == 0.0:
            return None
        positions = self.positions
        if placement.sequence_parallel:
            rows, rank = len(positions) // placement.tp.size, placement.tp.rank
            positions = positions[rank * rows : (rank + 1) * rows]
        return Dropout(p, derive(site_key(*site), self.sample_keys), positions)

    def attention_dropout(
        self, p: float, heads: int, placement: Placement, layer: int
    ) -> AttentionDropout | None:
        """The dropout of attention probabilities of this rank's `heads` heads, over all rows."""
        if self.sample_keys is None or p == 0.0:
            return None
        keys = derive(site_key("attention", layer), self.sample_keys)
        return AttentionDropout(p, keys, self.positions, self.positions, placement.tp.rank * heads)
