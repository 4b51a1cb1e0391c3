"""`SingleLayer`: a layer of a hybrid model, which is one mixer or one MLP: x + part(norm(x))."""

from __future__ import annotations

from torch import Tensor, nn

from megazero.config.tree.model import ModelConfig
from megazero.layers.inputs import LayerInputs
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.layers.sums import Sums
from megazero.layers.transformer import TransformerLayer, scaled
from megazero.ops.bias_dropout_add import bias_dropout_add


class SingleLayer(TransformerLayer):
    """A layer with one half of a `TransformerLayer`, and that one's inputs and results.

    Args:
        mixer: attention, or what has its interface; None in a layer that is an MLP.
        mlp: an MLP or experts; None in the others.
    """

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        placement: Placement,
        *,
        mixer: nn.Module | None = None,
        mlp: nn.Module | None = None,
    ):
        nn.Module.__init__(self)
        assert (mixer is None) != (mlp is None), "a layer is one of the two"
        self.layer, self.placement, self.dropout = layer, placement, config.hidden_dropout
        norm = (config.hidden_size, config.normalization, config.norm_epsilon, placement)
        self.input_norm = Norm(f"layers.{layer}.input_norm", *norm)
        self.mixer, self.mlp = mixer, mlp

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Sums]:
        normed, x = self.input_norm(x, both=True)
        normed, x = normed.to(self.placement.dtype), inputs.narrow(x)
        if self.mixer is not None:
            (out, bias), sums = self.mixer(normed, inputs), Sums()
            inputs = inputs.narrowed()
        else:
            normed, inputs = inputs.narrow(normed), inputs.narrowed()
            out, bias, sums = self.mlp(normed, inputs)
        out, bias = scaled(out, bias, inputs.branch_scale)
        dropout = self._dropout(inputs, "attention_out" if self.mlp is None else "mlp_out")
        return bias_dropout_add(out.to(x.dtype), bias, x, dropout), sums
