"""What a micro-batch brings to every layer besides the hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from megazero.layers.placement import Placement
from megazero.mpu import SampleStreams
from megazero.ops.dropout import Dropout

# What backward has left to do: each call adds one weight's gradient to its `grad` and returns the weight.
Deferred = list[Callable[[], nn.Parameter]]


class KeyValueStore(Protocol):
    """Keys and values of earlier positions, kept between generation steps."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [s, b, g, d] of `layer` and return all positions so far, [t, b, g, d]."""


@dataclass(frozen=True)
class LayerInputs:
    """Attributes:
    rotary: (cos, sin) tables of the micro-batch's positions, or None with learned positions.
    document_ids: int [b, s]; positions attend only within equal ids. None: all earlier positions.
    streams: random streams of the micro-batch's samples; None turns dropout off.
    cache: earlier keys and values during generation.
    deferred: where backward leaves the gradients of the linear layers' weights, to be computed later (the
        weight half of a split backward, Qi et al. 2023); None: backward computes them.
    """

    rotary: tuple[Tensor, Tensor] | None = None
    document_ids: Tensor | None = None
    streams: SampleStreams | None = None
    cache: KeyValueStore | None = None
    deferred: Deferred | None = None

    def dropout(self, p: float, x: Tensor, placement: Placement, *site: str | int) -> Dropout | None:
        """The dropout of hidden states `x` [s or s/tp, b, h] at `site` of the model."""
        if self.streams is None or p == 0.0:
            return None
        offset = placement.tp.rank * x.shape[0] if placement.sequence_parallel else 0
        return Dropout(p, self.streams.keys(*site).to(x.device), offset=offset)

    def attention_dropout(self, p: float, heads: int, x: Tensor, placement: Placement, layer: int):
        """The dropout of attention probabilities of this rank's `heads` heads."""
        if self.streams is None or p == 0.0:
            return None
        keys = self.streams.keys("attention", layer).to(x.device)
        return Dropout(p, keys, head_offset=placement.tp.rank * heads)
