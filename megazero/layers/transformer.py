"""One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megazero.config.tree.model import ModelConfig
from megazero.layers.inputs import LayerInputs
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.layers.sums import Sums
from megazero.ops.bias_dropout_add import bias_dropout_add
from megazero.ops.dropout import Dropout

Forward = Callable[[Tensor, LayerInputs], tuple[Tensor, Sums]]
"""The `forward` of a layer."""


class TransformerLayer(nn.Module):
    """[s, b, h] -> ([s, b, h], sums): [s/tp, b, h] under sequence parallelism, [r, b, h] if the inputs name
    the wanted rows. The sums are the layer's contributions to the step's sums.

    The model passes each layer its two halves, so the layers of a model may differ.

    Args:
        attention: (normed [s, b, h], inputs) -> ([s, b, h], bias still to be added or None).
        mlp: the same, and its sums.
    """

    def __init__(
        self, layer: int, config: ModelConfig, placement: Placement, attention: nn.Module, mlp: nn.Module
    ):
        super().__init__()
        self.layer = layer
        self.placement = placement
        self.dropout = config.hidden_dropout
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        norm = (config.hidden_size, config.normalization, config.norm_epsilon, placement)
        self.input_norm = Norm(f"layers.{layer}.input_norm", *norm)
        self.attention = attention
        self.mlp_norm = Norm(f"layers.{layer}.mlp_norm", *norm)
        self.mlp = mlp

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Sums]:
        normed, x = self.input_norm(x, both=True)
        out, bias = self.attention(normed.to(self.placement.dtype), inputs)
        residual = inputs.narrow(normed if self.residual_after_norm else x)
        inputs = inputs.narrowed()
        out, bias = scaled(out, bias, inputs.branch_scale)
        dropout = self._dropout(inputs, "attention_out")
        if bias is None and dropout is None:
            normed, x = self.mlp_norm(out.to(residual.dtype), residual)
        else:
            x = bias_dropout_add(out.to(residual.dtype), bias, residual, dropout)
            normed, x = self.mlp_norm(x, both=True)
        del out  # it has been added to x, and need not be there while the MLP runs
        out, bias, sums = self.mlp(normed.to(self.placement.dtype), inputs)
        out, bias = scaled(out, bias, inputs.branch_scale)
        residual = normed if self.residual_after_norm else x
        dropout = self._dropout(inputs, "mlp_out")
        return bias_dropout_add(out.to(residual.dtype), bias, residual, dropout), sums

    def _dropout(self, inputs: LayerInputs, site: str) -> Dropout | None:
        return inputs.layer_dropout(self.dropout, self.layer, site)


def use_forward(layer: nn.Module, forward: Forward) -> None:
    """Let `forward` compute the layer from now on; the layer's hooks stay."""
    layer.forward = forward


def scaled(out: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """A half's contribution to the hidden states, and its bias, times `scale`."""
    if scale == 1.0:
        return out, bias
    return out * scale, None if bias is None else bias * scale
