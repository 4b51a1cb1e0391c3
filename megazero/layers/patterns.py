"""Which keys a layer's attention sees by position, and its biases, as its spec says."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megazero.layers.placement import Placement
from megazero.layers.sparse_layouts import own_layout
from megazero.mpu.group import Group
from megazero.ops.attention import ALL, Pattern, Slopes
from megazero.spec.parts import SightSpec


def pattern_of(sight: SightSpec, layer: int, heads: Group) -> Pattern:
    """The keys that a token sees in a layer: all, a window plus the first tokens, or some blocks.

    (Child et al. 2019; Xiao et al. 2023.)

    Args:
        sight: what it sees.
        layer: the layer's number, from 0.
        heads: the ranks that the heads are sliced over.
    """
    layout = None if sight.sparse is None else own_layout(sight.sparse, layer, heads, causal=sight.causal)
    if sight.window is None:
        return ALL if layout is None else Pattern(layout=layout)
    return Pattern(sight.window, sight.sinks, layout=layout)


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head (ALiBi, Press et al. 2022).

    For a power of two they are 2^(-8 i / n), i = 1 to n. For another number they are those of the power below
    it, and then every other one of the power above.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * power + 1, 2)]
    return slopes + between[: heads - power]


@dataclass
class OwnSlopes:
    """The slopes of this rank's heads, as the model has them on any number of ranks.

    They are not weights, and a model may be built on the meta device, so they are made at their first use.
    """

    values: tuple[float, ...]
    made: Slopes | None = None

    @classmethod
    def of(cls, heads: int, placement: Placement) -> OwnSlopes:
        """The slopes of `heads` heads at a placement."""
        slopes = alibi_slopes(heads)
        here, first = len(slopes) // placement.tp.size, placement.tp.rank
        return cls(tuple(slopes[first * here : (first + 1) * here]))

    def on(self, device: torch.device) -> Slopes:
        """The slopes on a device."""
        if self.made is None or self.made.by_head.device != device:
            with torch.inference_mode(False):  # they outlive a generation, and a training may follow
                self.made = Slopes(torch.tensor(self.values, dtype=torch.float32, device=device))
        return self.made
