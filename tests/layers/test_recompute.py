"""Which layers are computed again in backward."""

from __future__ import annotations

from megazero.config.tree import RecomputeConfig
from megazero.layers import recompute_units


def units(layers: int, **config) -> list[tuple[list[int], bool]]:
    return [(list(span), again) for span, again in recompute_units(layers, RecomputeConfig(**config))]


def test_units_drawn_by_hand():
    assert units(4) == [([0, 1, 2, 3], False)]
    assert units(4, granularity="selective") == [([0, 1, 2, 3], False)]
    assert units(5, granularity="full", num_layers=2) == [([0, 1], True), ([2, 3], True), ([4], True)]
    assert units(4, granularity="full", method="block", num_layers=2) == [
        ([0], True),
        ([1], True),
        ([2, 3], False),
    ]
    assert units(2, granularity="full", method="block", num_layers=5) == [([0], True), ([1], True)]
