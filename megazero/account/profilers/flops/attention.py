"""Attention counted by its shapes, for kernels that are no operators of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from megazero.account.profilers.flops.counter import ModuleProfile
from megazero.account.profilers.flops.units import macs_to_string
from megazero.layers.attention import SelfAttention
from megazero.layers.inputs import LayerInputs
from megazero.layers.latent import LatentAttention
from megazero.layers.linear import ColumnParallelLinear

TOLERANCE = 0.01
"""The share of a count by which another count may be off."""


class AttentionShapes:
    """Counts attention by its shapes, beside the counter that sees only torch's own kernels.

    Args:
        sharers: the ranks that share a sequence; each does its part of all pairs.
    """

    def __init__(self, sharers: int):
        self.sharers = sharers
        self.counts = True
        self.warnings: list[str] = []
        self._rows: dict[nn.Module, tuple[int, int]] = {}
        self._macs: dict[nn.Module, int] = {}

    def see(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take note of the shapes of an attention, whose projection has the rows it sees: [s, b, ...]."""
        if isinstance(module, ColumnParallelLinear):
            self._rows[module] = output.shape[:2]
        if not self.counts or not isinstance(module, (SelfAttention, LatentAttention)):
            return
        if isinstance(module, SelfAttention):
            projection = module.qkv
            groups, _, width = projection.local_shape
            channels = groups * module.heads[0] * 2 * width  # queries of a group, without their gates
        else:
            projection = module.query
            heads, width = projection.local_shape
            channels = heads * (width + module.spec.value_dim)
        inputs, (rows, samples) = args[1], self._rows[projection]
        assert isinstance(inputs, LayerInputs), "a layer passes its inputs on"
        queries = rows if inputs.wanted is None else inputs.wanted.shape[0]
        pairs = queries * rows * self.sharers * samples
        self._macs[module] = self._macs.get(module, 0) + pairs * channels

    def stop(self) -> None:
        """Count no further step."""
        self.counts = False

    def complete(self, model: nn.Module, profiles: Mapping[nn.Module, ModuleProfile]) -> set[nn.Module]:
        """Add what the counter did not see to profiles; returns the modules whose figures that changed."""
        marked: set[nn.Module] = set()
        names = dict(model.named_modules())
        for name, module in names.items():
            expected = self._macs.get(module)
            if expected is None:
                continue
            inner = sum(profiles[child].macs for child in module.children())
            seen = profiles[module].macs - inner
            if seen and abs(seen - expected) > TOLERANCE * expected:
                self.warnings.append(
                    f"warning: {name} has {macs_to_string(seen)} of attention by the counter, and "
                    f"{macs_to_string(expected)} by its shapes"
                )
            if seen:
                continue
            parts = name.split(".")
            for depth in range(1, len(parts) + 1):
                outer = names[".".join(parts[:depth])]
                profiles[outer].macs += expected
                profiles[outer].flops += 2 * expected
                marked.add(outer)
        return marked
