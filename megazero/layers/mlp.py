"""The feed-forward half of a transformer layer."""

from __future__ import annotations

from torch import Tensor, nn

from megazero.layers.activation import SUMS_BIAS, activation_of
from megazero.layers.inputs import Deferred, LayerInputs
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.placement import Placement
from megazero.layers.sums import Sums
from megazero.layers.tiled import tile_size, tiled
from megazero.mpu.matrices import Matrices
from megazero.ops.included import Included, makes_sums
from megazero.spec.parts import MlpSpec

MLPResult = tuple[Tensor, Tensor | Included | None, Sums]
"""Hidden states, a bias still to be added to them or included, and the contributions to the step's sums."""


class MLP(nn.Module):
    """[s, b, h] -> ([s, b, h], bias still to be added, no sums), through an inner width f, sliced over tp.

    With gates, as in SwiGLU, the up weight has logical shape [2, f, h] (gate, then value) and is sliced
    along f.

    Args:
        name: global name.
        spec: its width and activation.
        placement: ranks, dtype and device.
        tiles: how many tiles of rows are computed one after another, so that [s, b, f] is never whole; 0 for
            tiles of about h rows. With tiles, backward computes weight gradients together with that of the
            input even where it could be split, since postponing them would keep what tiles free.
    """

    def __init__(self, name: str, spec: MlpSpec, placement: Placement, *, tiles: int = 1):
        super().__init__()
        self.tiles, stream, gated = tiles, spec.stream, spec.activation.gated
        self.up = ColumnParallelLinear(
            f"{name}.up",
            stream.width,
            spec.inner,
            placement,
            shard_dim=int(gated),
            bias=stream.bias,
            std=stream.std,
            matrices=Matrices(stacked=int(gated)),
        )
        self.kind = spec.activation
        self.activation = activation_of(spec.activation, f"{name}.activation", placement)
        self.down = RowParallelLinear(
            f"{name}.down", spec.width, stream.width, placement, bias=stream.bias, std=stream.out_std
        )
        self.up.in_tiles = self.down.in_tiles = tiles != 1
        self.sums_bias = spec.activation.name in SUMS_BIAS

    @property
    def last(self) -> RowParallelLinear | None:
        """The linear layer whose result is this module's; None if it computes the result in tiles."""
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
        inner = self.activation(self.up(x, deferred, detached=bias is not None), bias)
        out: tuple[Tensor, Tensor | Included | None] = self.down(inner, deferred)
        return out
