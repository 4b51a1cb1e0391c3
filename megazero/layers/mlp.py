"""The feed-forward half of a transformer layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.transformer import TransformerConfig
from megazero.layers.inputs import Deferred, LayerInputs
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear, residual_std
from megazero.layers.placement import Placement
from megazero.layers.sums import Sums
from megazero.layers.tiled import tile_size, tiled
from megazero.mpu.matrices import Matrices
from megazero.ops.bias_gelu import bias_gelu
from megazero.ops.gated import GatedUnit, gated
from megazero.ops.included import Included, makes_sums
from megazero.ops.squared_relu import squared_relu
from megazero.ops.swiglu import swiglu

MLPResult = tuple[Tensor, Tensor | Included | None, Sums]
"""Hidden states, a bias still to be added to them or included, and the contributions to the step's sums."""


def activated(inner: Tensor, config: TransformerConfig, included: Tensor | None = None) -> Tensor:
    """The model's nonlinearity of inner [..., f], or with gates of [..., 2 f]: [..., f].

    included: a bias [f] that inner holds already, whose gradient is made too; for GELU.
    """
    activation, offset = config.activation, config.glu_linear_offset
    clamp = config.activation_func_clamp_value
    if activation == "relu":
        return torch.threshold(
            inner, 0.0, 0.0
        )  # which saves what it is given, and not its result, as relu does
    if activation in ("swiglu", "geglu", "quick_geglu"):
        halves = inner.unflatten(-1, (2, inner.shape[-1] // 2))
        if activation == "swiglu" and not offset and clamp is None:
            return swiglu(halves)
        return gated(halves, GatedUnit(activation, offset, clamp))
    if activation == "squared_relu":
        return squared_relu(inner)
    return bias_gelu(inner, None, activation == "gelu_exact", included)


class MLP(nn.Module):
    """[s, b, h] -> ([s, b, h], bias still to be added, no sums), through an inner width f, sliced over tp.

    With gates, as in SwiGLU, the up weight has logical shape [2, f, h] (gate, then value) and is sliced
    along f.

    Args:
        layer: number of the layer.
        config: shape of the model.
        placement: ranks, dtype and device.
        name: global name; by default that of the layer's only MLP.
        width: f; by default the model's.
        tiles: how many tiles of rows are computed one after another, so that [s, b, f] is never whole; 0
            for tiles of about h rows.
            Backward then computes the weights' gradients with that of the input, also where it is split: to
            leave them for later would keep what tiles let go of.
    """

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        placement: Placement,
        *,
        name: str | None = None,
        width: int | None = None,
        tiles: int = 1,
    ):
        super().__init__()
        self.tiles = tiles
        name, width = name or f"layers.{layer}.mlp", width or config.ffn_size
        self.config = config
        self.up = ColumnParallelLinear(
            f"{name}.up",
            config.hidden_size,
            (2, width) if config.gated else (width,),
            placement,
            shard_dim=1 if config.gated else 0,
            bias=config.add_bias_linear,
            std=config.init_method_std,
            matrices=Matrices(stacked=1 if config.gated else 0),
        )
        self.down = RowParallelLinear(
            f"{name}.down",
            width,
            config.hidden_size,
            placement,
            bias=config.add_bias_linear,
            std=residual_std(config),
        )

        self.up.in_tiles = self.down.in_tiles = tiles != 1
        self.sums_bias = config.activation in ("gelu", "gelu_exact")

    @property
    def last(self) -> RowParallelLinear | None:
        """The layer that makes the result, as it is; None if it makes parts of it."""
        return None if self.down.in_tiles else self.down

    def forward(self, x: Tensor, inputs: LayerInputs) -> MLPResult:
        size = tile_size(x, self.tiles)
        if size >= len(x):
            return *self._of_rows(x, inputs.deferred), Sums()
        left = self.down.bias_left
        used = (p for p in self.parameters() if p is not left)
        return tiled(lambda rows: self._of_rows(rows)[0], x, size, tuple(used)), left, Sums()

    def _of_rows(
        self, x: Tensor, deferred: Deferred | None = None
    ) -> tuple[Tensor, Tensor | Included | None]:
        bias = self.up.bias if self.sums_bias and makes_sums(x) else None
        inner = activated(self.up(x, deferred, detached=bias is not None), self.config, bias)
        out: tuple[Tensor, Tensor | Included | None] = self.down(inner, deferred)
        return out
