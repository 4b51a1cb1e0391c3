"""The feed-forward half of a transformer layer."""

from __future__ import annotations

from torch import Tensor, nn

from megazero.config.tree import ModelConfig
from megazero.layers.inputs import LayerInputs
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear, residual_std
from megazero.layers.placement import Placement
from megazero.ops.bias_gelu import bias_gelu
from megazero.ops.squared_relu import squared_relu
from megazero.ops.swiglu import swiglu


class MLP(nn.Module):
    """[s, b, h] -> ([s, b, h], bias still to be added), through an inner width f that is sliced over tp.

    With SwiGLU the up weight has logical shape [2, f, h] (gate, then value) and is sliced along f.
    """

    def __init__(self, layer: int, config: ModelConfig, placement: Placement):
        super().__init__()
        self.activation = config.activation
        gated = config.activation == "swiglu"
        self.up = ColumnParallelLinear(
            f"layers.{layer}.mlp.up",
            config.hidden_size,
            (2, config.ffn_size) if gated else (config.ffn_size,),
            placement,
            shard_dim=1 if gated else 0,
            bias=config.add_bias_linear,
            std=config.init_method_std,
        )
        self.down = RowParallelLinear(
            f"layers.{layer}.mlp.down",
            config.ffn_size,
            config.hidden_size,
            placement,
            bias=config.add_bias_linear,
            std=residual_std(config.init_method_std, config.num_layers),
        )

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        inner = self.up(x, inputs.deferred)
        if self.activation == "swiglu":
            inner = swiglu(inner.view(*inner.shape[:-1], 2, -1))
        elif self.activation == "squared_relu":
            inner = squared_relu(inner)
        else:
            inner = bias_gelu(inner, None, exact=self.activation == "gelu_exact")
        return self.down(inner, inputs.deferred)
