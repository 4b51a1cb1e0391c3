"""Count the FLOPs of attention by its shapes, for kernels that are not operators of torch."""

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
"""The relative difference up to which two counts are equal."""


class AttentionShapes:
    """Counts attention by its shapes, because `OperatorCounter` sees only torch's operators.

    Args:
        sharers: the context-parallel ranks, each of which computes its share of all pairs.
    """

    def __init__(self, sharers: int):
        self.sharers = sharers
        self.counts = True
        self.warnings: list[str] = []
        self._rows: dict[nn.Module, tuple[int, int]] = {}
        self._macs: dict[nn.Module, int] = {}

    def see(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Count an attention after its forward; its projection's output [s, b, ...] has the token count."""
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
        assert isinstance(inputs, LayerInputs), "a layer passes LayerInputs to its attention"
        queries = rows if inputs.wanted is None else inputs.wanted.shape[0]
        pairs = queries * rows * self.sharers * samples
        self._macs[module] = self._macs.get(module, 0) + pairs * channels

    def stop(self) -> None:
        """Stop counting."""
        self.counts = False

    def complete(self, model: nn.Module, profiles: Mapping[nn.Module, ModuleProfile]) -> set[nn.Module]:
        """Add attention that the counter did not see to profiles; returns the modules that changed."""
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
