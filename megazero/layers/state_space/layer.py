"""`SingleLayer`: a layer which is one mixer or one MLP: x + part(norm(x)), or nothing."""

from __future__ import annotations

from torch import Tensor, nn

from megazero.layers.inputs import LayerInputs, hidden_sites
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.layers.sums import Sums
from megazero.layers.transformer import TransformerLayer, scaled
from megazero.ops.bias_dropout_add import bias_dropout_add
from megazero.spec.model import LayerSpec


class SingleLayer(TransformerLayer):
    """A layer with one half of a `TransformerLayer`, or none, and the same inputs and results.

    Args:
        mixer: attention, or a module with its interface; None in a layer that is an MLP.
        mlp: an MLP or experts; None in the others. Without either, the layer is the identity.
    """

    def __init__(
        self,
        layer: int,
        spec: LayerSpec,
        placement: Placement,
        *,
        mixer: nn.Module | None = None,
        mlp: nn.Module | None = None,
    ):
        nn.Module.__init__(self)
        self.layer, self.placement, self.sites = layer, placement, hidden_sites(layer)
        self.dropout, self.branch_scale = spec.stream.dropout, spec.stream.scale
        assert mixer is None or mlp is None, "a layer is one of the two"
        empty = mixer is None and mlp is None
        self.input_norm = None if empty else Norm(f"layers.{layer}.input_norm", spec.norm, placement)
        self.place = "mlp_out" if mixer is None else "attention_out"
        if mixer is not None:
            self.mixer = mixer
        elif mlp is not None:
            self.mlp = mlp

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Sums]:
        if self.input_norm is None:
            return inputs.narrow(x), Sums()
        normed, x = self.input_norm(x, both=True)
        normed, x, sums = normed.to(self.placement.dtype), inputs.narrow(x), Sums()
        if self.place == "mlp_out":
            normed, inputs = inputs.narrow(normed), inputs.narrowed()
            out, bias, sums = self.mlp(normed, inputs)
        else:
            out, bias = self.mixer(normed, inputs)
            inputs = inputs.narrowed()
        out, bias = scaled(out, bias, self.branch_scale * inputs.branch_scale)
        dropout = self._dropout(inputs, self.place)
        return bias_dropout_add(out.to(x.dtype), bias, x, dropout), sums
