"""Activation recompute: what backward computes again instead of keeping (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megazero.config.tree import RecomputeConfig
from megazero.layers.inputs import LayerInputs


def recompute_units(num_layers: int, config: RecomputeConfig) -> list[tuple[range, bool]]:
    """How consecutive layers are grouped: (layers, whether the group is recomputed).

    ``uniform`` cuts all layers in units of `num_layers`, ``block`` recomputes the first `num_layers` one by
    one and keeps the rest.
    """
    if config.granularity != "full":
        return [(range(num_layers), False)]
    if config.method == "uniform":
        size = config.num_layers
        return [(range(i, min(i + size, num_layers)), True) for i in range(0, num_layers, size)]
    first = min(config.num_layers, num_layers)
    units = [(range(i, i + 1), True) for i in range(first)]
    return units + ([(range(first, num_layers), False)] if first < num_layers else [])


def run_layers(
    layers: Sequence[nn.Module], x: Tensor, inputs: LayerInputs, units: list[tuple[range, bool]]
) -> Tensor:
    """Apply `layers` in order. Random streams are functions of place, so replay needs no saved state."""

    def run(x: Tensor, span: range) -> Tensor:
        for i in span:
            x = layers[i](x, inputs)
        return x

    for span, again in units:
        if again and x.requires_grad:
            x = checkpoint(run, x, span, use_reentrant=False, preserve_rng_state=False)
        else:
            x = run(x, span)
    return x
