"""One transformer layer: x + attention(norm(x)), then x + mlp(norm(x)), or both at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.computed_again import computed_again, saved_as
from megazero.layers.inputs import LayerInputs, hidden_sites
from megazero.layers.linear import RowParallelLinear
from megazero.layers.norm import Norm
from megazero.layers.placement import Placement
from megazero.layers.sums import Sums
from megazero.ops.bias_dropout_add import bias_dropout_add
from megazero.ops.dropout import Dropout
from megazero.ops.included import Included, settled
from megazero.spec.model import LayerSpec

Forward = Callable[[Tensor, LayerInputs], tuple[Tensor, Sums]]
"""The `forward` of a layer."""
Bias = Tensor | Included | None
"""A bias that is still to be added to a half's result, or that it includes."""


class TransformerLayer(nn.Module):
    """[s, b, h] -> ([s, b, h], sums): [s/tp, b, h] under sequence parallelism, [r, b, h] if the inputs name
    the wanted rows. The sums are the layer's contributions to the step's sums.

    The model passes each layer its two halves, so the layers of a model may differ.

    Args:
        attention: (normed [s, b, h], inputs) -> ([s, b, h], bias still to be added or included, or None). If
            a half names its `last` linear layer, that layer's result may include the bias whose gradient this
            layer then computes.
        mlp: the same, and its sums.
        recompute: which parts backward computes again; attention handles its core, and experts theirs.
    """

    def __init__(
        self,
        layer: int,
        spec: LayerSpec,
        placement: Placement,
        attention: nn.Module,
        mlp: nn.Module,
        recompute: RecomputeConfig | None = None,
    ):
        super().__init__()
        recompute = recompute or RecomputeConfig()
        self.norms_again = recompute.again("layernorm") and spec.norms != "output"
        self.mlp_again = recompute.again("moe" if spec.experts else "mlp")
        self.layer, self.sites = layer, hidden_sites(layer)
        self.placement = placement
        self.dropout, self.branch_scale = spec.stream.dropout, spec.stream.scale
        self.residual_after_norm = spec.residual_after_norm
        self.parallel, self.one_norm = spec.parallel, spec.one_norm

        def norm(name: str, position: str) -> Norm | None:
            if spec.norms not in (position, "both"):
                return None
            return Norm(f"layers.{layer}.{name}", spec.norm, placement)

        self.input_norm = norm("input_norm", "input")
        self.attention = attention
        self.attention_out_norm = norm("attention_out_norm", "output")
        self.mlp_norm = None if self.one_norm else norm("mlp_norm", "input")
        self.mlp = mlp
        for half in (attention, mlp):
            last = getattr(half, "last", None)
            if isinstance(last, RowParallelLinear) and type(self).forward is TransformerLayer.forward:
                last.hands_bias = True
        self.mlp_out_norm = norm("mlp_out_norm", "output")

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Sums]:
        normed, x = _normed(self.input_norm, x)
        out, bias = self._half(self.attention, self.input_norm, (normed, x), inputs)
        residual = inputs.narrow(normed if self.residual_after_norm else x)
        normed = inputs.narrow(normed) if self.one_norm else normed
        inputs = inputs.narrowed()
        out, bias = self._added(self.attention_out_norm, out, bias, inputs)
        dropout = self._dropout(inputs, "attention_out")
        if self.parallel:
            normed, read = (normed, residual) if self.one_norm else _normed(self.mlp_norm, residual)
            x = _sum(out, bias, read, dropout)
        else:
            normed, x = self._joint((out, bias), residual, dropout, self.mlp_norm)
        del out  # it has been added to x, and need not be there while the MLP runs
        read = read if self.parallel else x
        out, bias, sums = self._half(self.mlp, self.mlp_norm, (normed, read), inputs, again=self.mlp_again)
        out, bias = self._added(self.mlp_out_norm, out, bias, inputs)
        residual = normed if self.residual_after_norm else x
        dropout = self._dropout(inputs, "mlp_out")
        return _sum(out, bias, residual, dropout), sums

    def _joint(
        self,
        half: tuple[Tensor, Bias],
        residual: Tensor,
        dropout: Dropout | None,
        norm: Norm | None,
    ) -> tuple[Tensor, Tensor]:
        """The norm of the residual and a half's contribution (its result, and a bias to add), and that sum.

        Without a bias, dropout or missing norm in between, one pass computes both.
        """
        out, bias = half
        if isinstance(bias, Tensor) or dropout is not None or norm is None:
            return _normed(norm, _sum(out, bias, residual, dropout))
        included = None if bias is None else bias.bias
        normed, x = norm(out.to(residual.dtype), residual, both=True, included=included)
        return normed, x

    def _half(
        self,
        half: nn.Module,
        norm: Norm | None,
        rows: tuple[Tensor, Tensor],
        inputs: LayerInputs,
        *,
        again: bool = False,
    ) -> Any:
        """The result of a half for its normed input and that before the norm.

        again: whether backward computes the half again.
        """
        dtype, x = self.placement.dtype, rows[1]
        if norm is None or not self.norms_again:
            return computed_again(again, half, rows[0].to(dtype), inputs)
        if again:
            return computed_again(True, lambda: half(_normed(norm, x)[0].to(dtype), inputs))
        normed = rows[0].to(dtype)
        with saved_as(True, normed, lambda: _normed(norm, x)[0].to(dtype)):
            return half(normed, inputs)

    def _added(self, norm: Norm | None, out: Tensor, bias: Bias, inputs: LayerInputs) -> tuple[Tensor, Bias]:
        """A half's contribution to the hidden states, and a bias that is still to be added or included."""
        scale = self.branch_scale * inputs.branch_scale
        if isinstance(bias, Included):
            if norm is None and scale == 1.0:
                return out, bias
            out, bias = settled(out, bias.bias), None
        if norm is not None:
            out, bias = norm(out if bias is None else out + bias), None
        return scaled(out, bias, scale)

    def _dropout(self, inputs: LayerInputs, place: str) -> Dropout | None:
        return inputs.layer_dropout(self.dropout, self.sites[place])


def layers_of(blocks: Iterable[nn.Module]) -> list[TransformerLayer]:
    """The transformer layers among some blocks of a chunk, including those of multi-token prediction."""
    return [m for block in blocks for m in block.modules() if isinstance(m, TransformerLayer)]


def use_forward(layer: nn.Module, forward: Forward) -> None:
    """Replace the layer's `forward`; its hooks stay."""
    layer.forward = forward


def _sum(out: Tensor, bias: Bias, residual: Tensor, dropout: Dropout | None) -> Tensor:
    """The residual and a half's contribution, with a bias that is to be added or included."""
    out = out.to(residual.dtype)
    if isinstance(bias, Included):
        return bias_dropout_add(out, None, residual, dropout, bias.bias)
    return bias_dropout_add(out, bias, residual, dropout)


def _normed(norm: Norm | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of x, or x itself without one; and x."""
    if norm is None:
        return x, x
    normed, x = norm(x, both=True)
    return normed, x


def scaled(out: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """A half's contribution to the hidden states, and its bias, times `scale`."""
    if scale == 1.0:
        return out, bias
    return out * scale, None if bias is None else bias * scale
